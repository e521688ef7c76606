"""`python -m toolkit generate --chat`: talks to the model in the terminal."""

from __future__ import annotations

from typing import Any

from toolkit.cli.generate.model import load_generator
from toolkit.errors import UserError, escape_controls


def chat(name: str, dtype: str | None, settings: dict[str, Any]) -> None:
    """Read a turn, print the answer, until the input ends; an empty line begins a new chat.

    Raises:
        UserError: the model is an encoder-decoder, or its tokenizer has no chat template.
    """
    generator = load_generator(name, dtype, settings)
    if generator.is_seq2seq or generator.tokenizer.chat_template is None:
        why = "is an encoder-decoder" if generator.is_seq2seq else "has no chat template"
        raise UserError(f"--chat: {name} {why}: give the text as --text")
    print("An empty line begins a new chat; Ctrl-D ends.")
    messages: list[dict[str, Any]] = []
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not said:
            messages = []
            print("(a new chat)")
            continue
        messages.append({"role": "user", "content": said})
        [answer] = generator.generate([generator.encode_chat(messages)])
        print(escape_controls(answer), flush=True)
        messages.append({"role": "assistant", "content": answer})
