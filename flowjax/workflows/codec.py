"""Messages to token ids and back, by the tokenizer and chat template of a model folder."""

import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from flowjax.envs import Message, find_world
from flowjax.envs.demonstrations import base_words
from flowjax.fields import nearest
from flowjax.models.nano import build_tokenizer
from flowjax.run import Run

# Names that every template is given: by us, by transformers, and the special tokens.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_GIVEN |= {f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
_OPENED = re.compile(r"<think>\s*\Z")
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own tag around replies


def _load(folder: Path) -> Any:
    """The tokenizer of a model folder, by the rules in its tokenizer.json.

    Not by AutoTokenizer: for some model families, and for folders that name one of its classes, it applies the rules of
    that class instead, which give other ids than the model was trained on. It also imports torch, which takes seconds.
    """
    from transformers import PreTrainedTokenizerFast

    loaded: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    loaded._tokenizer.no_truncation()  # tokenizer.json may hold the truncation and padding of a training run
    loaded._tokenizer.no_padding()
    return loaded


class CodecError(ValueError):
    """A model folder without a usable tokenizer or chat template; the message names the remedy."""


class PromptTooLong(Exception):
    """A prompt over the limit; the episode ends here, truncated."""

    def __init__(self, tokens: int, limit: int):
        super().__init__(f"prompt of {tokens} tokens is over rollout.max_prompt_tokens={limit}")
        self.tokens, self.limit = tokens, limit


class PromptRefused(PromptTooLong):
    """A prompt that an endpoint refuses, in its own words, as too long for its model."""

    def __init__(self, said: str):
        Exception.__init__(self, said)


def check_template_options(template: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a chat template does not read: it would be rendered as if they were not there.

    Raises:
        CodecError: it does not read one of them.
    """
    sources = template.values() if isinstance(template, dict) else (template,)
    known = set[str]().union(*map(_template_variables, sources))
    if unread := [name for name in options if name not in known]:
        listed = ", ".join(sorted(known)) or "none"
        raise CodecError(
            f"config.model.template_options.{unread[0]} is set, but the model's chat template does not read it"
            f"{nearest(unread[0], known)}: leave it out, or all of a recipe's by "
            f"--config.model.template_options={{}}; it reads {listed}"
        )


def _template_variables(source: str) -> set[str]:
    """Names that a chat template reads, and that neither it, nor transformers, nor we set.

    Raises:
        CodecError: it is no template.
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # it only parses here
    try:
        tree = environment.parse(_MARKS.sub("", source))
    except TemplateSyntaxError as error:
        raise CodecError(f"the model's chat_template cannot be read ({error}): download its tokenizer again") from error
    # jinja counts a name that one branch sets and another one reads as undeclared, so names that the template sets are
    # left out. An option with a default is set, too, but after a test: `x is defined`, or `x | default(...)`.
    asked = {
        each.node.name
        for each in tree.find_all((nodes.Test, nodes.Filter))
        if isinstance(each.node, nodes.Name) and each.name in ("defined", "undefined", "default", "d")
    }
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"} - asked
    return meta.find_undeclared_variables(tree) - assigned - _GIVEN - set(environment.globals)


class Codec:
    """The tokenizer of one model folder.

    Rendering a chat template takes about ten times as long as joining its text with the contents. So the template's
    text around the contents is cached by the sequence of roles, where a trial rendering copies the contents unchanged.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_prompt_tokens: int | None = None,
        template_options: Mapping[str, Any] | None = None,
    ):
        if not Path(folder).is_dir():
            raise CodecError(
                f"config.model.path {folder} is not a folder: give a Hugging Face folder with tokenizer.json"
            )
        try:
            self._tokenizer: Any = _load(Path(folder))
        except (OSError, ValueError, KeyError) as error:
            raise CodecError(
                f"config.model.path {folder} has no readable tokenizer ({error}): add tokenizer.json"
            ) from error
        if not self._tokenizer.chat_template:
            raise CodecError(
                f"the tokenizer in config.model.path {folder} has no chat_template: use a chat model's tokenizer"
            )
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        # `|` takes the first alternative that matches, and one special token may be the start of another.
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or r"(?!)")  # (?!) matches nothing
        self._limit = max_prompt_tokens
        self._options = dict(template_options or {})
        if self._options:
            check_template_options(self._tokenizer.chat_template, self._options)
        self._frame = functools.lru_cache(maxsize=64)(self._make_frame)
        self._between = functools.lru_cache(maxsize=64)(self._make_between)

    @property
    def eos_token_id(self) -> int:
        return self._tokenizer.eos_token_id

    @functools.cached_property
    def tokens(self) -> frozenset[str]:
        """All tokens by their text; of a nano model, its words."""
        return frozenset(self._tokenizer.get_vocab())

    @functools.cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The special token with which the template ends a turn, where it is not the tokenizer's end-of-sequence token.

        They differ in base models that have a chat template but were not tuned on it, and in Gemma.
        """
        try:
            after = self._between(("user",))[0]
        except CodecError:  # the template changes contents, so that its text after them cannot be found
            return ()
        found = self._special.match(after.lstrip())
        end = self._tokenizer.convert_tokens_to_ids(found.group()) if found else self.eos_token_id
        return () if end == self.eos_token_id else (end,)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the prompt, up to where the assistant's reply begins.

        Raises:
            PromptTooLong: they are more than the codec's limit.
        """
        return self.within_limit(self._tokenize(self._text(messages)))

    def within_limit(self, prompt_ids: list[int]) -> list[int]:
        """The prompt as it is.

        Raises:
            PromptTooLong: it has more tokens than the codec's limit.
        """
        if self._limit is not None and len(prompt_ids) > self._limit:
            raise PromptTooLong(len(prompt_ids), self._limit)
        return prompt_ids

    def encode_after(self, reply: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Token ids that follow the sampled `reply` when the conversation goes on with `messages`.

        They are the messages and the template's text around them, up to where the next reply begins. The token that
        ends a turn is among them only where the reply was cut, and so lacks it. White space around contents is
        stripped, as many templates do.
        """
        text = self._between(tuple(message["role"] for message in messages))
        pieces = [text[0]]
        for message, after in zip(messages, text[1:], strict=True):
            pieces += self._plain(message["content"]).strip(), after
        ids = self._tokenize("".join(pieces))
        last = reply[-1] if len(reply) else None
        # The end token is looked for in the template's text, and not taken to be `eos_token_id`: Gemma's replies end
        # with another special token. Llama 2's template has a space before it.
        if last not in ids or self._tokenizer.decode([last], skip_special_tokens=True):
            return ids
        end = ids.index(last)
        return ids if self._tokenizer.decode(ids[:end]).strip() else ids[end + 1 :]

    def encode_reply(self, reply: str) -> list[int]:
        """Token ids of a complete reply, end-of-sequence included."""
        return [*self._tokenize(reply), self.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply, special tokens left out, with the <think> that its prompt may end with.

        Where the thinking was cut, this tag is the only sign that the text is thinking.
        """
        return self._opened + self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @functools.cached_property
    def _opened(self) -> str:
        found = _OPENED.search(self._render([{"role": "user", "content": "."}]))
        return found.group() if found else ""

    def _tokenize(self, text: str) -> list[int]:
        # The template has written its special tokens into the text: adding them would double the first one.
        return self._tokenizer._tokenizer.encode(text, add_special_tokens=False).ids

    def _text(self, messages: Sequence[Message]) -> str:
        frame = self._frame(tuple(message["role"] for message in messages))
        if frame is None:
            return self._render(messages)
        pieces = [frame[0]]
        for message, after in zip(messages, frame[1:], strict=True):
            pieces += self._plain(message["content"]), after
        return "".join(pieces)

    def _render(self, messages: Sequence[Message]) -> str:
        conversation = [{"role": message["role"], "content": self._plain(message["content"])} for message in messages]
        return self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **self._options
        )

    def _plain(self, content: str) -> str:
        """The content with a zero-width space in all that would be read as a special token.

        Otherwise a document, or another agent's reply, could end its turn and speak in another role.
        """
        return self._special.sub(lambda found: f"{found.group()[0]}\u200b{found.group()[1:]}", content)

    def _make_between(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """The template's text between a reply and the messages that follow it, between them, and after the last.

        Raises:
            CodecError: the template does not copy the contents, so a conversation cannot be extended token by token.
        """
        contents = [f"<content {i}>" for i in range(len(roles))]
        said, answered = "<first message>", "<reply>"
        follow = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        text = self._render([{"role": "user", "content": said}, {"role": "assistant", "content": answered}, *follow])
        pieces = []
        for content in (answered, *contents):
            before, found, text = text.partition(content)
            if not found:
                raise CodecError(
                    "the tokenizer's chat_template changes the messages that it renders, so that a conversation cannot "
                    "be extended token by token: use config.env.context=window"
                )
            pieces.append(before)
        return (*pieces[1:], text)

    def _make_frame(self, roles: tuple[str, ...]) -> tuple[str, ...] | None:
        """The template's text before, between and after the contents; None where it changes contents.

        Templates rewrite assistant turns (they drop earlier reasoning), so sequences with one are always rendered.
        """
        if not set(roles) <= {"system", "user"}:
            return None
        # White space around each, so that a template that strips contents is recognised as one that changes them.
        contents = [f" \n<content {i}>\n " for i in range(len(roles))]
        text = self._render([{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)])
        pieces = []
        for content in contents:
            before, found, text = text.partition(content)
            if not found:
                return None
            pieces.append(before)
        return (*pieces, text)


def codecs_of_agents(run: Run) -> dict[str, Codec]:
    """The codec of each agent whose base model's tokenizer is here, or is that of a nano base which is still to be
    made."""
    config, by_base = run.config, dict[str, Codec]()
    for name, base in run.bases.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(base.model.path)
            if not (folder / "tokenizer.json").exists():
                if base.model.nano is None:
                    continue
                folder = Path(made)
                build_tokenizer(base_words(run, name, find_world(config.env.name)(**config.env.options)), folder)
            options = base.model.template_options.to_dict()
            limit = config.rollout.max_prompt_tokens
            by_base[name] = Codec(folder, max_prompt_tokens=limit, template_options=options)
    speaks = {agent: run.policies[of].base.name if of in run.policies else of for agent, of in run.agents.items()}
    return {agent: by_base[base] for agent, base in speaks.items() if base in by_base}
