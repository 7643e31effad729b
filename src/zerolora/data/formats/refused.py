"""Columns and keys of messages that change what is learnt, so that no form may leave them unread.

To support an objective that takes them, add a form that reads them: only what a form does not read is looked up here.
"""

from typing import NamedTuple

from zerolora.data.formats.reading import FACTORS, SWITCHES


class Refusal(NamedTuple):
    """What a column or key is, and what to write instead of it. forms: the forms it concerns; empty for all."""

    what: str
    remedy: str
    forms: tuple[str, ...] = ()


CONVERSATIONS = ("alpaca", "messages", "prompt", "sharegpt")
MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image", "image_path", "pixel_values"), "images"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
}
"""What a column, a key of a message or a part of a content of this name or type holds, beside text."""
JUDGED = (
    *("chosen", "rejected", "chosen_response", "rejected_response", "chosen_messages", "rejected_messages"),
    *("positive_messages", "negative_messages", "label", "labels", "kto_tag", "margin"),
)
"""Columns and keys of preference data, as TRL, LLaMA-Factory, ms-swift and axolotl name them."""
WEIGHTS = (*FACTORS, *SWITCHES, "sample_weight")
"""Of a whole row; those of a message are read."""
REFUSED: dict[str, Refusal] = {
    **dict.fromkeys(
        JUDGED,
        Refusal(
            "judges or compares answers, and every answer would be learnt: only supervised fine-tuning is supported",
            "name the answers to learn, as in columns: {completion: chosen}",
        ),
    ),
    **{
        name: Refusal(
            f"holds {kind}, which are not supported: only text can be trained on, of a vision-language model too",
            "remove it",
        )
        for name, kind in MEDIA.items()
    },
    **dict.fromkeys(
        ("train_detail", "training_detail", "segments"),
        Refusal("says which parts of a text are learnt", "split the text into turns, each with train: true or false"),
    ),
    **dict.fromkeys(
        ("completion_mask", "assistant_masks", "prompt_mask"),
        Refusal("says which tokens are learnt", "write labels, with -100 for tokens that are not learnt", ("tokens",)),
    ),
    **dict.fromkeys(
        ("context", "history"),
        Refusal("changes what is asked, and this form does not read it", "put it into the question", CONVERSATIONS),
    ),
    **dict.fromkeys(
        ("tools", "functions"),
        Refusal("is a list of tools, which only a row or its system message can have", "move it there", CONVERSATIONS),
    ),
    "input": Refusal("changes what is asked, and this form does not read it", "put it into the prompt", ("prompt",)),
    **dict.fromkeys(
        WEIGHTS,
        Refusal("weighs a whole row, and rows have no weight", "remove rows of weight 0, weigh files by sources"),
    ),
}
