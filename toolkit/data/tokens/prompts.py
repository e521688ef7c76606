"""Examples of a causal model's run → text, with the positions of the turns that the model has to write."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from toolkit.data.rows.example import Example
from toolkit.data.tokens.chat_template import NoMaskError, RefusedChatError, Turn, render_chat, render_turns
from toolkit.data.tokens.omissions import find_omissions
from toolkit.data.tokens.special_tokens import show
from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prepared(NamedTuple):
    """An example as text, with the positions of the turns that the model has to write."""

    text: str
    """Of a chat, with its special tokens marked."""
    turns: list[Turn]
    """The turns to train on; for a prompt with its completion, the completion."""
    lead_texts: list[str]
    """The text that the lead baseline reads, for each turn."""
    counts_whole: bool
    """Whether all tokens of the text count in the loss."""
    is_chat: bool
    omitted: str = ""
    """Which of `omissions.KINDS` the chat template leaves out of what is not to be trained on."""


def prepare_text(example: Example, loss_on: str) -> Prepared:
    """Prepare a text, or a prompt with its completion."""
    if example.prompt is None or example.completion is None:
        return Prepared(str(example.text), [], [], counts_whole=True, is_chat=False)
    text = example.prompt + example.completion
    turn = Turn(len(example.prompt), len(text), len(text) + 1)  # the end token counts as one more character
    return Prepared(text, [turn], [example.lead_text], counts_whole=loss_on == "all", is_chat=False)


def prepare_chat(tokenizer: PreTrainedTokenizerBase, example: Example, loss_on: str, where: str) -> Prepared:
    """Prepare a chat as its template renders it; a `UserError` if the template refuses the chat, leaves out what is to be trained
    on, or does not show which text is the assistant's, or a turn has weight 0 although all tokens count."""
    messages, tools, weight_0 = example.messages or [], example.tools, example.weight_0
    if weight_0 and loss_on == "all":
        raise UserError(
            f"{where}: message {weight_0[0] + 1} has weight 0, but data.loss_on all counts every token: set it to completions, "
            "or leave the weight out"
        )
    # Render, and locate the assistant's turns; without them, only data.loss_on all is possible.
    turns: list[Turn] = []
    try:
        text, turns = render_turns(tokenizer, messages, tools)
    except NoMaskError as error:
        if loss_on == "completions":
            raise UserError(
                f"{where}: the chat template does not show which tokens are the assistant's: {error}; give "
                "data.chat_template with {% generation %} ... {% endgeneration %} around the assistant's text "
                "(recipes/chat_templates/chatml_generation.jinja is one for ChatML), or set data.loss_on all"
            ) from None
        text = render_chat(tokenizer, messages, tools)
    except RefusedChatError as error:
        raise UserError(
            f"{where}: the chat template refuses this conversation ({error}): change the row, or set data.chat_template to a "
            "template that takes it"
        ) from None
    # Check that the template has printed everything, then keep the turns to train on.
    trained_turns = set(example.trained_turns)
    omitted = set()
    for what, i, excerpt in find_omissions(show(tokenizer, text), messages, tools, turns):
        # Many templates leave out earlier thinking. Where all tokens count, that is the form that was asked for.
        is_asked_for = what == "thinking" and loss_on == "all" and any(m["role"] == "user" for m in messages[i or 0 :])
        if i in trained_turns and not is_asked_for:
            raise UserError(
                f"{where}: the chat template leaves out the {what} of message {i + 1}, {excerpt!r:.60}, which is to be trained "
                "on: set data.chat_template to a template that prints it, or take it out of the row"
            )
        omitted.add(what)
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [(i, turn) for i, turn in zip(spoken, turns, strict=False) if i in trained_turns]
    lead_texts = [next(m["content"] for m in reversed(messages[:i]) if m["role"] == "user") for i, _ in trained]
    turns = [turn for _, turn in trained]
    return Prepared(text, turns, lead_texts, counts_whole=loss_on == "all", is_chat=True, omitted=", ".join(sorted(omitted)))
