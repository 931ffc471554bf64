"""Search: BM25 against its formula, dense retrieval against a product written out, both kept on disk."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import letter_encoder
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowjax.envs import WorldError
from flowjax.envs.search import index as index_module
from flowjax.envs.search import server
from flowjax.envs.search.corpus import encyclopedia
from flowjax.envs.search.index import BM25Index, DenseIndex, load_encoder

K1, B = 1.5, 0.75
WORDS = ["lake", "como", "river", "town", "mayor", "zebra", "kobold"]  # their own stems, and no stop words
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8), min_size=2, max_size=9)


def plain_bm25(texts: list[list[str]], query: list[str]) -> list[float]:
    """Robertson's formula with Lucene's idf, a document at a time."""
    mean_length = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        counts, score = Counter(text), 0.0
        for word in query:
            holding = sum(word in other for other in texts)
            idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            score += idf * counts[word] / (counts[word] + K1 * (1 - B + B * len(text) / mean_length))
        scores.append(score)
    return scores


@given(TEXTS, st.lists(st.sampled_from(WORDS), max_size=4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_bm25_equals_its_formula_and_ties_go_by_row(texts: list[list[str]], query: list[str], count: int):
    index = BM25Index([" ".join(text) for text in texts])
    [found] = index.search([" ".join(query)], count)
    expected = plain_bm25(texts, query)
    everything = index.search([" ".join(query)], len(texts))[0]
    assert found == everything[:count]
    assert {row for row, _ in everything} == {row for row, score in enumerate(expected) if score > 0}
    for row, score in everything:
        assert score == pytest.approx(expected[row], rel=1e-5)
    assert everything == sorted(everything, key=lambda item: (-item[1], item[0]))


def test_a_corpus_without_words_is_refused():
    with pytest.raises(WorldError, match="no passage of the corpus has a word to search for"):
        BM25Index(["the a of", ""])


def test_words_are_stemmed_and_stop_words_ignored():
    index = BM25Index(["the rivers run", "a lake", "running water"])
    assert [row for row, _ in index.search(["a River"], 3)[0]] == [0]
    assert {row for row, _ in index.search(["RUNS"], 3)[0]} == {0, 2}
    assert index.search(["the", "", "?!", "unheard-of"], 3) == [[], [], [], []]


def test_bm25_is_the_same_after_saving(tmp_path: Path):
    book = encyclopedia(200, 0)
    index = BM25Index([document.contents for document in book.documents()])
    index.save(tmp_path / "index")
    queries = [*book.names[::9], "the mayor of the town"]
    assert BM25Index.load(tmp_path / "index").search(queries, 5) == index.search(queries, 5)


@pytest.mark.parametrize("library", ["faiss", "numpy"])
def test_dense_retrieval_equals_the_product_written_out(library: str, monkeypatch: pytest.MonkeyPatch):
    if library == "numpy":
        monkeypatch.setattr(index_module, "_faiss", lambda: None)
    texts = [document.contents for document in encyclopedia(200, 0).documents()]
    index = DenseIndex.build(texts, letter_encoder.encode)
    queries = ["Who is the mayor?", *encyclopedia(200, 0).names[:20]]
    vectors, asked = letter_encoder.encode(texts, "passage"), letter_encoder.encode(queries, "query")
    for query, found in zip(asked, index.search(queries, 5), strict=True):
        scores = [float(np.dot(query, vector)) for vector in vectors]
        best = sorted(scores, reverse=True)[:5]
        assert [score for _, score in found] == pytest.approx(best, abs=1e-5)
        assert all(scores[row] == pytest.approx(score, abs=1e-5) for row, score in found)


def test_of_equal_passages_the_first_rows_are_found():
    once = np.random.default_rng(0).normal(size=(3000, 64)).astype(np.float32)
    index = DenseIndex(lambda texts, role: once[list(map(int, texts))], np.concatenate([once] * 4))
    found = [[row for row, _ in index.search([str(number)], 3)[0]] for number in range(60)]
    assert found == [[number, number + 3000, number + 6000] for number in range(60)]


def test_vectors_are_kept(tmp_path: Path):
    texts = ["lake como", "river town", "zebra"]
    built = DenseIndex.build(texts, letter_encoder.encode, save_to=tmp_path / "vectors.npy")
    loaded = DenseIndex.load(tmp_path / "vectors.npy", letter_encoder.encode)
    assert loaded.search(["zebras"], 2) == built.search(["zebras"], 2)
    with pytest.raises(WorldError, match=r"only as a \.npy file"):
        DenseIndex.build(texts, letter_encoder.encode, save_to=tmp_path / "vectors.index")


def test_an_index_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def begun(path: Any, *args: Any, **options: Any) -> None:
        made = Path(path)
        (made / "params.index.json" if made.is_dir() else made).write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr("bm25s.BM25.save", lambda self, folder, **options: begun(folder))
    with pytest.raises(KeyboardInterrupt):
        BM25Index(["a lake"]).save(tmp_path / "index")
    monkeypatch.setattr(np, "save", begun)
    with pytest.raises(KeyboardInterrupt):
        DenseIndex.build(["a lake"], letter_encoder.encode, save_to=tmp_path / "vectors.npy")
    monkeypatch.setattr(faiss, "write_index", lambda index, path: begun(path))
    with pytest.raises(KeyboardInterrupt):
        started(tmp_path, "--compress=IVF64,SQ8")
    assert list(tmp_path.iterdir()) == []


DENSE = [["--index=dense"], ["--index=dense", "--compress=Flat"]]


def start(path: Path, seed: int, *flags: str) -> tuple[Any, Any]:
    """Documents and index of a server over 200 generated passages."""
    given = ["--documents=200", f"--corpus_seed={seed}", "--encoder=letter_encoder:encode", f"--index_path={path}"]
    return server.load(server.read_arguments([*given, *flags]))


@pytest.mark.parametrize("flags", DENSE)
def test_a_dense_index_has_its_name_only_once_what_it_was_made_of_is_there(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    path = tmp_path / ("made.index" if "--compress=Flat" in flags else "made.npy")
    monkeypatch.setattr(index_module, "replace_file", killed)
    with pytest.raises(KeyboardInterrupt):
        start(path, 1, *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", DENSE)
def test_a_dense_index_that_another_server_replaced_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / ("made.index" if "--compress=Flat" in flags else "made.npy")
    real = index_module.replace_file

    def meanwhile(note: Path, text: str) -> None:
        monkeypatch.setattr(index_module, "replace_file", real)
        real(note, text)
        with ThreadPoolExecutor(1) as other:  # a thread has unfinished files of its own, as a process has
            other.submit(start, path, 1, *flags).result()

    monkeypatch.setattr(index_module, "replace_file", meanwhile)
    documents, index = start(path, 0, *flags)
    assert index.search([documents[5].contents], 1)[0][0][0] == 5
    for seed in (0, 1):
        with pytest.raises(WorldError, match=r"was made of, or with, something else .*: remove it to have it made"):
            start(path, seed, *flags)
    path.unlink()
    for _ in range(2):
        documents, index = start(path, 1, *flags)
        assert index.search([documents[5].contents], 1)[0][0][0] == 5


def test_two_servers_that_make_one_index_keep_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = BM25Index(["a lake", "a river"]), BM25Index(["the sea", "a town"])
    real = type(first._bm25).save

    def meanwhile(self: Any, folder: str, **options: Any) -> None:
        monkeypatch.setattr("bm25s.BM25.save", real)
        first.save(tmp_path / "index")
        real(self, folder, **options)

    monkeypatch.setattr("bm25s.BM25.save", meanwhile)
    second.save(tmp_path / "index")
    second.save(tmp_path / "index")
    assert BM25Index.load(tmp_path / "index").search(["lake"], 2) == first.search(["lake"], 2) != []
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("folder", ["--index=bm25"]),
        ("file", ["--index=bm25"]),
        ("vectors.npy", []),
        ("made.index", ["--compress=IVF64,SQ8"]),
    ],
)
def test_an_index_that_cannot_be_read_is_named_with_the_remedy(name: str, flags: list[str], tmp_path: Path):
    path = tmp_path / name
    if name == "folder":
        BM25Index(["a lake"]).save(path)
        path = path / "params.index.json"
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(
        WorldError, match=rf"--index_path={tmp_path / name} cannot be read .*: remove it to have it made"
    ):
        started(tmp_path, f"--index_path={tmp_path / name}", *flags)


def started(folder: Path, *flags: str) -> tuple[Any, Any]:
    """Documents and index of a server over 3,000 generated passages."""
    paths = [f"--index_path={folder / 'made.index'}", "--encoder=letter_encoder:encode", "--index=dense"]
    return server.load(server.read_arguments(["--documents=3000", *paths, *flags]))


@pytest.mark.parametrize("given_vectors", ["", "vectors.npy", "exact.index"])
def test_a_compressed_index_is_made_once_and_finds_nearly_what_the_exact_one_does(tmp_path: Path, given_vectors: str):
    texts = [document.contents for document in encyclopedia(3000, 0).documents()]
    vectors = letter_encoder.encode(texts, "passage")
    exact = DenseIndex(letter_encoder.encode, vectors)
    np.save(tmp_path / "vectors.npy", vectors)
    faiss.write_index(exact._index, str(tmp_path / "exact.index"))
    more = [f"--vectors={tmp_path / given_vectors}"] if given_vectors else []
    found, recall = [], {}
    for probes in (64, 1, 64):  # made by the first, read by the others
        _, index = started(tmp_path, "--compress=IVF64,SQ8", f"--search_with=nprobe={probes}", *more)
        found = index.search(texts[:200], 3)
        pairs = zip(found, exact.search(texts[:200], 3), strict=True)
        recall[probes] = np.mean([len({row for row, _ in one} & {row for row, _ in other}) / 3 for one, other in pairs])
    assert recall[64] > 0.9 > recall[1] > 0.3  # passages of few letters differ by little
    assert all(found[row][0][0] == row and abs(found[row][0][1] - 1.0) < 0.01 for row in range(200))
    assert [path.name for path in sorted(tmp_path.iterdir()) if "made" in path.name] == [
        "made.index",
        "made.index.made.json",
    ]


def vowels(texts: Sequence[str], role: str) -> np.ndarray:
    return np.array([[text.count(letter) + 1.0 for letter in "aeiou"] for text in texts], np.float32)


def nothing(texts: Sequence[str], role: str) -> np.ndarray:
    return np.full((len(texts), letter_encoder.WIDTH), np.nan, np.float32)


def test_an_index_of_something_else_is_refused(tmp_path: Path):
    with (tmp_path / "corpus.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": str(number), "contents": f"word{number}"}) + "\n" for number in range(50))
    corpus = f"--corpus={tmp_path / 'corpus.jsonl'}"
    dense = ["--index=dense", "--encoder=letter_encoder:encode", f"--index_path={tmp_path / 'made.index'}"]
    bm25 = f"--index_path={tmp_path / 'bm25'}"

    def start(*flags: str) -> None:
        server.load(server.read_arguments(flags))

    for _ in range(2):
        start(corpus, *dense, "--compress=Flat")
        start(corpus, bm25)
    made = json.loads((note := tmp_path / "made.index.made.json").read_text())
    note.write_text(json.dumps({name: value for name, value in made.items() if name != "file_digest"}))
    start(corpus, *dense)  # versions before wrote no digest of the file
    start("--documents=200", f"--index_path={tmp_path / 'seed'}")
    for flags, named in (
        ([*dense, "--compress=SQ8"], "made.index was made .* .compress 'Flat', here 'SQ8'.: remove it to have it made"),
        ([*dense, "--encoder=test_search_index:vowels"], "'letter_encoder:encode', here 'test_search_index:vowels'"),
    ):
        with pytest.raises(WorldError, match=named):
            start(corpus, *flags)
    with pytest.raises(WorldError, match=r"seed was made of, or with, something else .contents"):
        start("--documents=200", "--corpus_seed=1", f"--index_path={tmp_path / 'seed'}")
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "corpus.jsonl").write_text("".join(reversed(lines)))
    note.write_text(json.dumps({name: value for name, value in made.items() if name != "lines"}))
    with pytest.raises(WorldError, match=r"something else .contents '\w+', here '\w+'.: remove it"):
        start(corpus, *dense)  # versions before wrote no digest of the lines
    note.write_text(json.dumps(made))
    for flags in ([bm25], dense):
        with pytest.raises(WorldError, match=r"was made of, or with, something else .contents"):
            start(corpus, *flags)


def test_an_edit_of_one_of_thousands_of_passages_is_seen(tmp_path: Path):
    path, flags = (
        tmp_path / "corpus.jsonl",
        [f"--corpus={tmp_path / 'corpus.jsonl'}", f"--index_path={tmp_path / 'made'}"],
    )
    lines = [json.dumps({"id": str(number), "contents": f"word{number}"}) + "\n" for number in range(5000)]
    path.write_text("".join(lines))
    server.load(server.read_arguments(flags))
    lines[7] = lines[7].replace("word7", "another word7")
    path.write_text("".join(lines))
    with pytest.raises(WorldError, match=r"made was made of, or with, something else .lines"):
        server.load(server.read_arguments(flags))


def test_chinese_and_japanese_words_are_found_by_their_characters():
    index = BM25Index(["北京是中国的首都。", "東京は日本の首都です。", "Paris is the capital of France", "GPU显卡"])
    assert index.search(["中国首都"], 1)[0][0][0] == 0
    assert index.search(["日本の首都"], 1)[0][0][0] == 1
    assert [row for row, _ in index.search(["gpu"], 4)[0]] == [row for row, _ in index.search(["显卡"], 4)[0]] == [3]


def test_an_encoder_of_another_width_is_named_with_both(tmp_path: Path):
    np.save(tmp_path / "of_others.npy", np.ones((200, 64), np.float32))
    given = ["--documents=200", "--index=dense", "--encoder=test_search_index:vowels"]
    with pytest.raises(WorldError, match="it makes 5 numbers of a text, the index has 64"):
        server.load(server.read_arguments([*given, f"--index_path={tmp_path / 'of_others.npy'}"]))


def test_a_folder_that_is_no_index_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorldError, match=r"--index_path=\. cannot be read .* or give another"):
        server.load(server.read_arguments(["--documents=200", "--index_path=."]))


def test_what_two_servers_make_at_once_is_known_by_what_the_first_one_made_it_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def start(seed: int) -> tuple[Any, Any]:
        given = ["--documents=200", f"--corpus_seed={seed}", f"--index_path={tmp_path / 'index'}"]
        return server.load(server.read_arguments(given))

    real = server._make_index

    def meanwhile(*given: Any) -> Any:
        monkeypatch.setattr(server, "_make_index", real)
        start(1)
        return real(*given)

    monkeypatch.setattr(server, "_make_index", meanwhile)
    (tmp_path / "index.json").write_text("of one's own")
    documents, index = start(0)
    assert index.search([documents[5].contents], 1)[0][0][0] == 5
    with pytest.raises(WorldError, match=r"was made of, or with, something else .contents"):
        start(0)
    start(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "index.json"]
    assert (tmp_path / "index.json").read_text() == "of one's own"


@pytest.mark.parametrize("flags", [[], ["--index=dense", "--encoder=letter_encoder:encode"]])
def test_an_index_is_the_same_from_every_working_folder(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        given = ["--documents=200", f"--index_path={tmp_path / 'index.npy'}", *flags]
        documents, index = server.load(server.read_arguments(given))
        assert index.search([documents[5].contents], 1)[0][0][0] == 5


def test_a_path_that_cannot_be_written_is_refused_before_passages_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(server, "_make_index", lambda *given: pytest.fail("it was made first"))
    for flags in (["--index=bm25"], [], ["--compress=Flat"]):
        with pytest.raises(WorldError, match=r"--index_path=.*/file/x\.index cannot be written .*: give another"):
            started(tmp_path, *flags, f"--index_path={tmp_path / 'file' / 'x.index'}")


def test_two_servers_may_try_one_path_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = Path.unlink

    def second_first(self: Path, missing_ok: bool = False) -> None:
        monkeypatch.setattr(Path, "unlink", real)
        index_module.try_writing(tmp_path / "index")
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", second_first)
    index_module.try_writing(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_cannot_be_searched_is_refused_at_the_start(tmp_path: Path):
    texts = [document.contents for document in encyclopedia(200, 0).documents()]
    DenseIndex.build(texts, letter_encoder.encode, save_to=tmp_path / "of_others.npy")
    for encoder in ("test_search_index:vowels", "test_search_index:nothing"):
        flags = [f"--encoder={encoder}", f"--index_path={tmp_path / 'of_others.npy'}", "--index=dense"]
        with pytest.raises(WorldError, match=f"--encoder={encoder} cannot search the index"):
            server.load(server.read_arguments(["--documents=200", *flags]))
    with pytest.raises(WorldError, match="cannot search the index with --search_with='nprobe=0'"):
        started(tmp_path, "--compress=IVF64,SQ8", "--search_with=nprobe=0")


def test_an_encoder_that_gives_no_numbers_finds_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_module, "_faiss", lambda: None)
    given = ["--documents=200", "--index=dense", "--encoder=test_search_index:nothing"]
    with pytest.raises(WorldError, match="nothing is found"):
        server.load(server.read_arguments(given))


def nothing_of_digits(texts: Sequence[str], role: str) -> np.ndarray:
    vectors = letter_encoder.encode(texts, role)
    vectors[[not any(map(str.isalpha, text)) for text in texts]] = np.nan
    return vectors


@pytest.mark.parametrize("library", ["faiss", "numpy"])
@pytest.mark.parametrize("row", [0, 2])
def test_a_passage_without_numbers_is_not_found_and_the_others_are(
    row: int, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if library == "numpy":
        monkeypatch.setattr(index_module, "_faiss", lambda: None)
    texts = ["lake como", "river town", "zebra"]
    texts.insert(row, "12 345")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": "0", "contents": text}) + "\n" for text in texts))
    given = [f"--corpus={corpus}", "--index=dense", "--encoder=test_search_index:nothing_of_digits"]
    _, index = server.load(server.read_arguments(given))
    assert [[texts[row] for row, _ in found] for found in index.search(["zebra", "42", "lake como"], 1)] == [
        ["zebra"],
        [],
        ["lake como"],
    ]
    assert len(index.search(["zebra"], 4)[0]) == 3


def test_what_makes_no_compressed_index_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(WorldError, match=r"--compress=IVF64,XY: faiss makes no such index of 3000 passages"):
        started(tmp_path, "--compress=IVF64,XY")
    with pytest.raises(WorldError, match=r"--compress=IVF4000,SQ8: faiss makes no such index of 3000 passages"):
        started(tmp_path, "--compress=IVF4000,SQ8")
    with pytest.raises(WorldError, match=r"needs --index_path: a file that is not \.npy"):
        started(tmp_path, "--compress=IVF64,SQ8", "--index_path=index.npy")
    with pytest.raises(WorldError, match=r"--compress, --vectors and --search_with are for --index=dense"):
        started(tmp_path, "--compress=IVF64,SQ8", "--index=bm25")
    np.save(tmp_path / "few.npy", np.eye(8, dtype=np.float32))
    with pytest.raises(WorldError, match=r"--vectors=.*few\.npy holds 8 passages and the corpus 3000"):
        started(tmp_path, "--compress=IVF64,SQ8", f"--vectors={tmp_path / 'few.npy'}")
    for flags in ([f"--vectors={tmp_path / 'few.npy'}"], ["--compress=IVF64,SQ8", "--vectors=nowhere.npy"]):
        with pytest.raises(WorldError, match=r"is the file that --compress makes an index of: give both"):
            started(tmp_path, *flags)
    with pytest.raises(WorldError, match=r"--search_with=probes=3: the index has no such parameter"):
        started(tmp_path, "--compress=IVF64,SQ8", "--search_with=probes=3")
    (tmp_path / "made.index").unlink()
    monkeypatch.setattr(index_module, "_faiss", lambda: None)
    with pytest.raises(WorldError, match=r"--compress=IVF64,SQ8 needs faiss: pip install -e \"\.\[search-dense\]"):
        started(tmp_path, "--compress=IVF64,SQ8")


def test_an_encoder_is_found_by_its_dotted_path_or_said_to_be_missing():
    assert load_encoder("letter_encoder:encode") is letter_encoder.encode
    for name in ("nowhere/at/all", "letter_encoder:decode", "no_such_module:encode"):
        with pytest.raises(WorldError, match=rf"the encoder is '{name}', which cannot be imported .*: give the folder"):
            load_encoder(name)


@pytest.mark.parametrize("name", ["plain", "e5-tiny"])
def test_a_folders_encoder_pools_over_words_and_knows_e5s_prefixes(tmp_path: Path, name: str):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "query", "passage", ":", "lake", "como", "town"]
    tokenizer = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / name
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = BertModel(BertConfig(vocab_size=len(words), **sizes)).eval()
    model.save_pretrained(folder)
    prefix = ["query", ":"] if name == "e5-tiny" else []
    encoded = load_encoder(str(folder))(["lake", "lake como town"], "query")
    for vector, text in zip(encoded, (["lake"], ["lake", "como", "town"]), strict=True):
        ids = torch.tensor([[words.index(word) for word in prefix + text]])
        mean = model(ids).last_hidden_state[0].detach().numpy().mean(0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
