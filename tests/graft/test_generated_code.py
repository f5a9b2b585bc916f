"""What of a generated file counts as code, and the digest that results know it by."""

from graft.bench import code
from graft.lab.generated_code import code_lines

SOURCE = """# AOT ID: ['0_inference']
import torch

async_compile = AsyncCompile()
# kernel path: /cache/a.py
triton_per_fused_sum_0 = async_compile.triton('triton_per_fused_sum_0', '''
    @triton_heuristics.reduction(
        inductor_meta={'kernel_name': 'triton_per_fused_sum_0', 'backend_hash': 'ABC123', 'num_load': 2}   
    )
    # a comment
    x = 1  # kept
''')
"""  # noqa: E501, W291 - as it is generated
# Result files hold digests; a digest that changed would make two of the same code look unlike.
DIGEST = "0cc89c8c586f"


def test_comments_blank_lines_and_trailing_spaces_are_no_code():
    assert code_lines("# a\n\n  x = 1  # b  \n   \n  # c\ny\n") == ["  x = 1  # b", "y"]


def test_the_digest_of_a_code_is_what_it_was():
    assert code.digest([SOURCE]) == DIGEST
    assert code.digest([SOURCE, SOURCE]) == "954d523c9754"


def test_the_digest_is_of_the_code_alone():
    other = SOURCE.replace("/cache/a", "/other/b").replace("ABC123", "F0").replace("   \n", "\n\n")
    assert other != SOURCE
    assert code.digest([other]) == DIGEST
    assert code.digest([SOURCE.replace("x = 1", "x = 2")]) != DIGEST
