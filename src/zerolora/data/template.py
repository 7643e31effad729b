"""From a row to text: prompt and answer as the model will see them."""

from typing import Any

from zerolora.errors import UserError


def render(tokenizer: Any, template: str, system: str, row: dict[str, str]) -> tuple[str, str]:
    """Return (prompt, answer) texts; the answer ends with the stop token, and only the answer is learned.

    template "chat": the tokenizer's own chat template. "plain": BOS, system, instruction and input joined by
    line breaks. Raises UserError if the tokenizer has no chat template, or one whose prompt does not begin the
    whole conversation (then prompt and answer cannot be told apart).
    """
    question = "\n".join(part for part in (row["instruction"], row["input"]) if part)
    stop = tokenizer.eos_token
    if stop is None:
        raise UserError("the model's tokenizer has no end-of-sequence token; set eos_token in tokenizer_config.json")
    if template == "plain":
        prompt = (tokenizer.bos_token or "") + "\n".join(part for part in (system, question) if part)
        return prompt, row["output"] + stop
    if not tokenizer.chat_template:
        raise UserError("the model's tokenizer has no chat template; write template: plain")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": row["output"]}], tokenize=False)
    if not whole.startswith(prompt):
        raise UserError("the model's chat template writes the prompt differently once answered; write template: plain")
    answer = whole[len(prompt) :]
    end = answer.find(stop)
    # Templates write more after the stop token (a line break); the model never gets to say that.
    return prompt, (answer if end < 0 else answer[:end]) + stop
