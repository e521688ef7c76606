"""Pairs of answers to one prompt, a chosen and a rejected one, as texts or as lists of messages."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from toolkit.data.rows.messages import read_chat
from toolkit.data.sources.row import check_text
from toolkit.errors import UserError

_TURN_OF_TEXT = "\n\nAssistant:"
"""Begins the answers in the texts of HH-RLHF."""


def read_pair(
    cells: Mapping[str, Any], tools: Any, system: str, where: str, *, is_chat: bool, may_guess: bool
) -> dict[str, Any] | str:
    """The fields of a pair's `Example`, or the reason to skip it. Malformed messages are a `UserError`.

    Of lists that begin with the same messages, these are the prompt; so is the common beginning of two texts, up to its last
    `Assistant:` line or else to a whole word, as TRL's `extract_prompt` takes it.

    Args:
        cells: by column: the prompt, if it has one, then the chosen and the rejected answer.
        where: file and row, for messages.
        is_chat: texts among the cells are turns.
        may_guess: two texts without a prompt or an `Assistant:` line may begin with one.
    """
    *given, chosen, rejected = cells.values()
    names = list(cells)[-2:]
    if not is_chat:
        for name, value in cells.items():
            check_text(value, f"{where}, column {name}")
        prompt = given[0] if given else _common_beginning(chosen, rejected)
        if not given and not may_guess and not prompt.endswith(_TURN_OF_TEXT):
            trouble = f"columns {names[0]} and {names[1]} do not begin with a prompt that ends in {_TURN_OF_TEXT.strip()!r}"
            raise UserError(f"{where}: {trouble}: set data.prompt_column to the column that has the prompt")
        texts = [chosen, rejected] if given else [chosen[len(prompt) :], rejected[len(prompt) :]]
        if reason := _find_fault(texts, names, is_empty=lambda text: not text.strip()):
            return reason
        if not prompt.strip():
            return "whose answers begin differently, so that they have no prompt"
        return {"prompt": prompt, "completion": texts[0], "rejected": texts[1], "lead_text": prompt}
    # Lists of messages.
    answers = [[{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in (chosen, rejected)]
    for name, answer in zip(names, answers, strict=True):
        if not isinstance(answer, list) or not all(isinstance(message, dict) for message in answer):
            raise UserError(f"{where}, column {name}: {answer!r:.60} is not a text or a list of messages: make it one")
    prompt = given[0] if given else []
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not given or any(answer[0].get("role") not in ("assistant", "tool") for answer in answers):
        common = [first for first, _ in takewhile(lambda both: both[0] == both[1], zip(*answers, strict=False))]
        if prompt and not _ends_with(common, prompt):
            return f"with a prompt that is not that of {names[0]} and {names[1]}"
        prompt, answers = common, [answer[len(common) :] for answer in answers]
    if reason := _find_fault(answers, names, is_empty=lambda answer: not answer):
        return reason
    if any(answer[0].get("role") != "assistant" for answer in answers):
        return f"whose {names[0]} and {names[1]} have different prompts"
    read = [
        read_chat({"prompt": prompt, name: answer}, tools, where, system=system, for_generation=False)
        for name, answer in zip(names, answers, strict=True)
    ]
    for of_answer in read:
        if isinstance(of_answer, str):
            return of_answer
        if any(place >= len(prompt) for place in of_answer["weight_0"]):
            raise UserError(f"{where}: a turn of an answer has weight 0, but answers count as a whole: leave the weight out")
    first, second = (of_answer for of_answer in read if not isinstance(of_answer, str))
    return {**first, "weight_0": [], "rejected": second["messages"]}


def _find_fault(answers: list[Any], names: list[str], is_empty: Any) -> str:
    """Why two answers cannot be compared; empty if they can."""
    for name, answer in zip(names, answers, strict=True):
        if is_empty(answer):
            return f"with an empty {name}" if not is_empty(answers[0]) or not is_empty(answers[1]) else "with two equal answers"
    return "with two equal answers" if answers[0] == answers[1] else ""


def _common_beginning(first: str, second: str) -> str:
    common = os.path.commonprefix([first, second])
    if _TURN_OF_TEXT in common:
        return common[: common.rindex(_TURN_OF_TEXT) + len(_TURN_OF_TEXT)]
    return re.sub(r"\s*\S*\Z", "", common) if common not in (first, second) else common


def _ends_with(messages: Sequence[Any], prompt: Sequence[Any]) -> bool:
    """Whether `messages` are a prompt, perhaps after a system turn or earlier turns."""
    said = [[(message.get("role"), message.get("content")) for message in each] for each in (messages, prompt)]
    return said[0][-len(prompt) :] == said[1]
