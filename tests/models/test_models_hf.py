"""Folders of Hugging Face models: the same log-probabilities as transformers and PEFT, both ways; clear refusals."""

import json
import os
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tiny_models import TINY, hf_logprobs, logprobs, make_hf_folder, randomise_adapter, tiny_decoder
from transformers import AutoModelForCausalLM

from flowjax.models import hf
from flowjax.models.hf import check_weights, load_decoder, save_decoder, save_int8
from flowjax.models.lora import Lora, adapter_arrays, adapter_from_peft, peft_tensors
from flowjax.models.shape import Experts, ModelError
from flowjax.weights.hand_over import peft_config


@pytest.fixture
def qwen3(tmp_path):
    return make_hf_folder(tmp_path / "model", "qwen3", head_dim=8, tie_word_embeddings=False)


def _transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(
    "lora",
    [Lora(4, 8.0), Lora(4, 8.0, rslora=True), Lora(2, 4.0, targets=("v_proj", "down_proj"))],
    ids=["all", "rslora", "two_targets"],
)
def test_adapter_equals_peft_and_its_merged_export(qwen3, tokens, tmp_path, lora):
    decoder = load_decoder(qwen3, lora=lora, dtype=jnp.float32, remat="none")
    randomise_adapter(decoder)
    mine = logprobs(decoder, tokens)
    tensors = peft_tensors(decoder.adapter, decoder.config, lora)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, str(adapter / "adapter_model.safetensors"))
    (adapter / "adapter_config.json").write_text(json.dumps(peft_config(lora, str(qwen3))))
    base = _transformers(qwen3)
    assert np.abs(hf_logprobs(base, tokens) - mine).max() > 0.1
    np.testing.assert_allclose(hf_logprobs(PeftModel.from_pretrained(base, adapter), tokens), mine, atol=1e-4)

    save_decoder(decoder, tmp_path / "merged")
    np.testing.assert_allclose(hf_logprobs(_transformers(tmp_path / "merged"), tokens), mine, atol=1e-4)
    merged = load_decoder(tmp_path / "merged", dtype=jnp.float32, remat="none")
    np.testing.assert_allclose(logprobs(merged, tokens), mine, atol=1e-4)

    back = adapter_from_peft(tensors, decoder.config, lora)
    for target, parts in adapter_arrays(decoder.adapter).items():
        for part, array in parts.items():
            np.testing.assert_array_equal(back[target][part], array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_read_and_written(qwen3, tmp_path, dtype):
    model = _transformers(qwen3)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "half")
    decoder = load_decoder(tmp_path / "half", dtype=dtype)
    assert decoder.embedding.get_value().dtype == jnp.dtype(dtype)
    weight = model.model.layers[1].self_attn.q_proj.weight.float().detach().numpy()
    np.testing.assert_array_equal(np.asarray(decoder.layers["q_proj"].get_value()[1], np.float32), weight.T)
    save_decoder(decoder, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == dtype
    theirs, mine = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "again"))
    assert theirs.keys() == mine.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == mine[name].dtype
        np.testing.assert_array_equal(tensor, mine[name])


def test_several_files_with_an_index(qwen3, tokens, tmp_path, monkeypatch):
    decoder = load_decoder(qwen3, dtype=jnp.float32, remat="none")
    monkeypatch.setattr(hf, "SHARD_BYTES", 10_000)
    save_decoder(decoder, tmp_path / "shards")
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    mine = logprobs(decoder, tokens)
    np.testing.assert_array_equal(
        logprobs(load_decoder(tmp_path / "shards", dtype=jnp.float32, remat="none"), tokens), mine
    )
    np.testing.assert_allclose(hf_logprobs(_transformers(tmp_path / "shards"), tokens), mine, atol=1e-4)
    monkeypatch.undo()
    save_decoder(decoder, tmp_path / "shards")
    assert [path.name for path in (tmp_path / "shards").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_weights_go_through_host_memory_piece_by_piece(tmp_path, tokens, monkeypatch, architecture):
    """However large a stacked parameter is, the host holds one piece of it: no more than a file of the folder has."""
    experts = Experts(4, 2, 24) if architecture == "qwen3_moe" else None
    decoder = tiny_decoder(architecture=architecture, experts=experts, layers=6)
    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    save_decoder(decoder, tmp_path)
    largest_file = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    monkeypatch.setattr(hf, "PIECE_BYTES", 8_000)
    sizes, alive, most = [], [], []
    read = hf._read_part

    def watched(*args):
        piece = read(*args)
        alive.append(weakref.ref(piece))
        sizes.append(piece.nbytes)
        most.append(sum(array.nbytes for held in alive if (array := held()) is not None and array.ndim > 2))
        return piece

    monkeypatch.setattr(hf, "_read_part", watched)
    loaded = load_decoder(tmp_path, dtype=jnp.float32, remat="none")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    assert max(sizes) <= largest_file
    assert max(most) <= 3 * max(sizes)  # those before may still be on their way when the next is read
    np.testing.assert_array_equal(logprobs(loaded, tokens), logprobs(decoder, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_copy_holds_what_the_trainer_quantises_to(tmp_path, monkeypatch, dtype):
    """An engine's base in int8 and a trainer's are one: the same codes and scales."""
    folder = make_hf_folder(tmp_path / "whole", "qwen3")
    _transformers(folder).to(dtype).save_pretrained(folder)
    monkeypatch.setattr(hf, "SHARD_BYTES", 2**14)
    save_int8(folder, tmp_path / "small")
    stored = hf.TensorFolder(tmp_path / "small")
    decoder = load_decoder(folder, dtype=jnp.float32, quantize="int8")
    for target in ("q_proj", "down_proj"):
        matrix = decoder.parameter(target).get_value()
        for layer, name in enumerate(hf.hf_names(target, decoder.config)):
            codes, trained = stored.read(name, (slice(None),) * 2), np.asarray(matrix.codes[layer]).T
            scales = stored.read(f"{name}_scale", (slice(None),) * 2)
            # XLA multiplies by 1 / 127, which may be the next float, so that halves may be rounded the other way.
            assert (codes != trained).mean() < 1e-3 and np.abs(codes.astype(int) - trained).max() <= 1
            np.testing.assert_allclose(scales[:, 0], np.asarray(matrix.scales[layer, 0]), rtol=2e-7)
    whole = hf.TensorFolder(folder)
    names = whole.names()
    assert stored.names() - names == {f"{name}_scale" for name in names if name.endswith("_proj.weight")}
    for name in names - {name for name in names if name.endswith("_proj.weight")}:
        index = (slice(None),) * len(whole.shape(name))
        np.testing.assert_array_equal(stored.read(name, index), whole.read(name, index))
    assert json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "whole"]


def test_merging_happens_in_float32():
    """Each of 64 updates is far below bfloat16's resolution next to 1; only a float32 sum keeps them."""
    decoder = tiny_decoder(Lora(64, 64.0, targets=("q_proj",)))
    decoder.layers["q_proj"].set_value(jnp.ones_like(decoder.layers["q_proj"].get_value()))
    for param in decoder.adapter["q_proj"].values():
        param.set_value(jnp.full_like(param.get_value(), 0.0625))
    merged = dict(hf.merged_tensors(decoder, jnp.bfloat16))["model.layers.0.self_attn.q_proj.weight"]
    assert np.unique(merged.astype(np.float32)).tolist() == [1.25]


def test_numbers_beyond_float16_are_not_written(tmp_path):
    decoder = tiny_decoder()
    weight = decoder.layers["down_proj"].get_value()
    decoder.layers["down_proj"].set_value(weight.at[1, 0, 0].set(70_000.0))
    with pytest.raises(ModelError, match=r"layers.1.mlp.down_proj.weight has numbers that float16 does not hold"):
        save_decoder(decoder, tmp_path / "out", dtype="float16")
    save_decoder(decoder, tmp_path / "out", dtype="bfloat16")


def _edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, str(path))


def test_missing_tensor(qwen3):
    _edit(qwen3, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 tensors .* such as model.layers.1.mlp.up_proj.weight"):
        load_decoder(qwen3)


def test_wrong_shape(qwen3):
    _edit(qwen3, lambda tensors: tensors.update({"model.norm.weight": np.ones(7, np.float32)}))
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(7,\), and config.json makes it \(24,\)"):
        load_decoder(qwen3)


def test_tensor_nobody_uses(qwen3):
    _edit(qwen3, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": np.ones(4, np.float32)}))
    with pytest.raises(ModelError, match=r"has 1 tensors that a qwen3 model does not use, such as .*sinks"):
        load_decoder(qwen3)


def test_a_head_that_is_not_the_embedding_is_not_dropped(qwen3, monkeypatch):
    described = json.loads((qwen3 / "config.json").read_text()) | {"tie_word_embeddings": True}
    (qwen3 / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match=r"lm_head.weight is not the embedding: set tie_word_embeddings to false"):
        load_decoder(qwen3)
    monkeypatch.setattr(hf, "PIECE_BYTES", 1_000)
    _edit(qwen3, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert load_decoder(qwen3).config.tie_embeddings

    def last_row(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"][-1, -1] += 1.0

    _edit(qwen3, last_row)
    with pytest.raises(ModelError, match=r"lm_head.weight is not the embedding"):
        load_decoder(qwen3)


def test_no_safetensors(qwen3):
    (qwen3 / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no \*.safetensors file: download the model in safetensors format"):
        load_decoder(qwen3)


def test_names_in_two_files_without_an_index(qwen3):
    """The last file by alphabet had counted, a backup say."""
    save_file({"tok_embeddings.weight": np.ones(3, np.float32)}, str(qwen3 / "consolidated.safetensors"))
    assert load_decoder(qwen3).config.architecture == "qwen3"
    names = load_file(qwen3 / "model.safetensors")
    save_file({"model.norm.weight": names["model.norm.weight"]}, str(qwen3 / "old.safetensors"))
    with pytest.raises(ModelError, match=r"has model.norm.weight in model.safetensors and in old.safetensors:"):
        load_decoder(qwen3)
    (qwen3 / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    )
    assert load_decoder(qwen3).config.architecture == "qwen3"


def test_file_of_an_index_is_missing(qwen3):
    names = load_file(qwen3 / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00001-of-00002.safetensors cannot be read .*: download it again"):
        load_decoder(qwen3)


def test_an_index_that_is_cut_short(qwen3):
    """It was a trace of the JSON reader, in the trainer, after the engine had started."""
    (qwen3 / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head')
    with pytest.raises(ModelError, match=r"index.json cannot be read .*: download it again"):
        check_weights(qwen3)


def test_what_would_not_load_is_refused_without_loading_it(qwen3):
    check_weights(qwen3)
    _edit(qwen3, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale": np.ones(4, np.float32)}))
    with pytest.raises(ModelError, match="weight_scale: adapters must be merged, and quantised models are not"):
        check_weights(qwen3)


def test_truncated_file(qwen3):
    data = (qwen3 / "model.safetensors").read_bytes()
    (qwen3 / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read .*: download it again"):
        load_decoder(qwen3)


def test_an_int8_copy_is_whole_or_not_there(qwen3, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(hf, "save_file", full)
        patched.setattr(hf.signal, "signal", lambda *_: None)
        patched.setattr("sys.argv", ["hf", f"--model={qwen3}", f"--int8={tmp_path / 'small'}"])
        with pytest.raises(SystemExit, match=r"small cannot be made: .*No space left"):
            hf.main()
    assert not (tmp_path / "small").exists()
    assert not list(tmp_path.glob(".small*")), "a full disk is not kept full"
    (tmp_path / ".small.killed").mkdir()
    save_int8(qwen3, tmp_path / "small")
    assert (tmp_path / "small" / "config.json").exists() and not (tmp_path / ".small.killed").exists()


def test_an_int8_copy_of_something_else_gives_way(qwen3, tmp_path):
    """One of another machine's codes, or of a base that was made anew, was served without a word."""
    small = tmp_path / "small"

    def made(**options: int) -> tuple[int, np.ndarray]:
        save_int8(qwen3, small, **options)
        stored = load_file(small / "model.safetensors")
        return (small / "config.json").stat().st_mtime_ns, stored["model.layers.0.mlp.up_proj.weight"]

    first, codes = made()
    assert made()[0] == first and np.abs(codes).max() == 127
    again, codes = made(largest_code=63)
    assert again != first and np.abs(codes).max() == 63
    os.utime(qwen3 / "model.safetensors", (1, 1))
    assert made(largest_code=63)[0] != again


@pytest.mark.parametrize("place", ["model", "notes"])
def test_an_int8_copy_takes_nobodys_place(qwen3, tmp_path, place):
    """The base itself, named by mistake, was replaced by its copy."""
    folder = {"model": qwen3, "notes": tmp_path / "notes"}[place]
    folder.mkdir(exist_ok=True)
    (folder / "thesis.txt").write_text("years of work")
    before = sorted(folder.iterdir())
    with pytest.raises(ModelError, match="there already and no int8 copy: name a new one"):
        save_int8(qwen3, folder)
    assert sorted(folder.iterdir()) == before


def test_the_command_of_an_int8_copy_names_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["hf", f"--model={tmp_path / 'nowhere'}", f"--int8={tmp_path / 'small'}"])
    with pytest.raises(SystemExit, match=r"small cannot be made: model folder '.*nowhere' does not exist"):
        hf.main()


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match=r"model folder '.*nowhere' does not exist: give the path"):
        load_decoder(tmp_path / "nowhere")


def test_tokenizer_files_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_text("not copied")
    save_decoder(tiny_decoder(), tmp_path / "out", tokenizer=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert load_decoder(tmp_path / "out").config == TINY
