"""What cannot be opened is refused by name, with the reason."""

import pytest

import backbone_surgery as bs
from tests.families import ROWS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"use_bidirectional_attention": True},
            "attention to earlier tokens.*embeds texts",
        ),
        ({"dtype": "float16"}, "another dtype than float16, in which KerasHub clips"),
    ],
)
def test_blocks_of_gemma3_that_are_refused(options, words):
    backbone = ROWS["gemma3"].make(num_layers=1, **options)
    with pytest.raises(bs.SurgeryError, match=f"open at 'decoder_block_0': expected {words}"):
        bs.open_backbone(backbone)
