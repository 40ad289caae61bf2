"""What a task has for chats: its template, and prompts by it."""

from typing import Any

from backbone_surgery.generation import chat


class ChatTask:
    """A base of tasks whose preprocessor may have a chat template."""

    preprocessor: Any

    @property
    def chat_template(self) -> str | None:
        """The chat template of the tokenizer, in Jinja; `None` if there is none.

        `from_preset` reads it from the folder: from `chat_template.jinja`, or else from
        `tokenizer_config.json`. It belongs to the tokenizer, so every model over this tokenizer has
        it. It can be set.
        """
        return chat.chat_of(self.preprocessor).template

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        chat.set_template(self.preprocessor, template)

    def chat_prompt(
        self, messages: Any, add_generation_prompt: bool = True, template: str | None = None
    ) -> str:
        """Render a conversation with the chat template, as `transformers` does.

        `generate`, `stream` and the engine turn the result into the token ids that
        `apply_chat_template` of `transformers` gives: the prompt has a start token where the
        template writes one, and the preprocessor adds none. This holds for the string that is
        returned, and for it with text added to its end. Any other string gets the start token as
        usual. `strip_prompt=True` returns the answer alone.

        Args:
            messages: a list of dicts with a `role` and a `content`: a string, or a list of parts
                such as `{"type": "text", "text": "Hello"}`. For a template that does not go over
                the parts, their texts are joined by newlines. A message with `tool_calls` may have
                no content.
            add_generation_prompt: whether to end with the opening of an answer.
            template: in Jinja, in place of `chat_template`.

        Returns:
            The prompt.

        Raises:
            SurgeryError: there is no template or no preprocessor, jinja2 is missing (`pip install
                "backbone-surgery[chat]"`), a message is malformed, the template fails, or the
                tokenizer does not make one token of a special token in the prompt.
        """
        return chat.chat_prompt(self.preprocessor, messages, add_generation_prompt, template)
