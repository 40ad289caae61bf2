"""What is read off the text of a compiled program, against sums made by hand."""

import pytest

from backbone_surgery.planning.hlo import read_module, read_step, size_of

# Two blocks of 1,000 floats are read and 10 floats of a cache written, for each token.
TEXT = """HloModule jit_call, is_scheduled=true

%fused_update (p0: f32[100,10], p1: f32[10], p2: s32[]) -> f32[100,10] {
  %p0 = f32[100,10]{1,0} parameter(0)
  %p1 = f32[10]{0} parameter(1)
  %new = f32[1,10]{1,0} bitcast(%p1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[100,10]{1,0} dynamic-update-slice(%p0, %new, %p2, %zero)
}

%fused_row (p0: f32[100,10], p1: s32[]) -> f32[10] {
  %p0 = f32[100,10]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,10]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,10}
  ROOT %flat = f32[10]{0} bitcast(%row)
}

%inner (s: (s32[], f32[10])) -> (s32[], f32[10]) {
  %s = (s32[], f32[10]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %v = f32[10]{0} get-tuple-element(%s), index=1
  %w = f32[10]{0} negate(%v)
  ROOT %t = (s32[], f32[10]) tuple(%n, %w)
}

%body (state: (s32[], f32[100,10], f32[1000])) -> (s32[], f32[100,10], f32[1000]) {
  %state = (s32[], f32[100,10]{1,0}, /*index=2*/f32[1000]{0}) parameter(0)
  %slot = s32[] get-tuple-element(%state), index=0
  %cache = f32[100,10]{1,0} get-tuple-element(%state), index=1
  %weight = f32[1000]{0} get-tuple-element(%state), index=2
  %row = f32[10]{0} fusion(%cache, %slot), kind=kLoop, calls=%fused_row, metadata={op_name="a(b)"}
  %made = (f32[10]{0}, s8[64]{0}) custom-call(%row, %weight), custom_call_target="__cublas"
  %token = f32[10]{0} get-tuple-element(%made), index=0
  %sum = f32[10]{0} all-reduce(%token), replica_groups={{0,1}}, to_apply=%add, {"exec_time_us":16.5}
  %pair = (s32[], f32[10]{0}) tuple(%slot, %sum)
  %loop = (s32[], f32[10]{0}) while(%pair), body=%inner, config={"known_trip_count":{"n":"3"}}
  %out = f32[10]{0} get-tuple-element(%loop), index=1
  %written = f32[100,10]{1,0} fusion(%cache, %out, %slot), calls=%fused_update, {"exec_time_us":2.5}
  %turned = f32[100,10]{0,1} copy(%written)
  ROOT %next = (s32[], f32[100,10]{1,0}, f32[1000]{0}) tuple(%slot, %turned, %weight)
}

ENTRY %main (a: f32[100,10], b: f32[1000]) -> f32[100,10] {
  %a = f32[100,10]{1,0} parameter(0)
  %b = f32[1000]{0} parameter(1)
  %begin = s32[] constant(0)
  %first = f32[1000]{0} all-gather(%b), dimensions={0}
  %args = (s32[], f32[100,10]{1,0}, f32[1000]{0}) tuple(%begin, %a, %first)
  %tokens = (s32[], f32[100,10]{1,0}, f32[1000]{0}) while(%args), condition=%go, body=%body
  ROOT %result = f32[100,10]{1,0} get-tuple-element(%tokens), index=1
}
"""


def test_a_step_is_what_the_loop_over_tokens_does():
    step = read_step(TEXT, in_loop=True)
    assert step.kernels == {"fusion": 2, "custom-call": 1, "all-reduce": 1, "negate": 3, "copy": 1}
    assert step.exchanges == {"all-reduce": 1}
    row = 10 * 4
    by_hand = (
        (row + 4 + row)  # a row of the cache, by its number
        + (row + 1000 * 4 + row)  # the product; what it has to work in is not counted
        + (row + row)  # the sum over devices
        + 3 * (row + row)  # the loop inside
        + (row + 4 + row)  # a row is written in place; the rest of the cache is not read
        + (1000 * 4 + 1000 * 4)  # the copy of all of it
    )
    assert step.bytes == by_hand
    assert step.copied_bytes == 1000 * 4
    assert step.seconds == pytest.approx(19e-6)
    assert step.cycles is None


def test_where_an_exchange_has_no_estimate_none_is_made_of_the_rest():
    """As the compiler of JAX 0.12 leaves it out for GPUs."""
    assert read_step(TEXT.replace(', {"exec_time_us":16.5}', ""), in_loop=True).seconds is None


# A product with 2 of 8 experts, and a kernel of another name over the same arrays.
ON_A_GPU = """
ENTRY %main (i: s32[2], x: bf16[2,16], w: bf16[8,16,32]) -> f32[1,2,32] {
  %i = s32[2]{0} parameter(0)
  %x = bf16[2,16]{1,0} parameter(1)
  %w = bf16[8,16,32]{2,1,0} parameter(2)
  ROOT %y = f32[1,2,32]{2,1,0} custom-call(%i, %x, %w), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={grid_x = 2 : i32, name = "product_of_chosen", num_warps = 4 : i32}
}
"""


def test_a_kernel_of_our_own_has_no_estimate_and_reads_the_chosen_experts_alone():
    step = read_step(ON_A_GPU, in_loop=False)
    rest = 2 * 4 + 2 * 16 * 2 + 2 * 32 * 4
    assert step.bytes == step.own_bytes == rest + 2 * 16 * 32 * 2
    other = read_step(ON_A_GPU.replace("product_of_chosen", "attend_one"), in_loop=False)
    assert other.bytes == other.own_bytes == rest + 8 * 16 * 32 * 2
    foreign = read_step(ON_A_GPU.replace("__gpu$xla.gpu.triton", "__cublas$gemm"), in_loop=False)
    assert foreign.own_bytes == 0


# Up to two of eight experts, of which the chip knows when it begins.
USED_ON_A_TPU = """
ENTRY %main (i: s32[2], n: s32[1], x: bf16[1,2,16], w: bf16[8,16,32]) -> bf16[2,2,32] {
  %i = s32[2]{0} parameter(0)
  %n = s32[1]{0} parameter(1)
  %x = bf16[1,2,16]{2,1,0} parameter(2)
  %w = bf16[8,16,32]{2,1,0} parameter(3)
  ROOT %y = bf16[2,2,32]{2,1,0} custom-call(%i, %n, %x, %w), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(run)/while/body/product_of_used/pallas_call"}
}
"""


def test_of_a_tpu_the_most_experts_that_may_be_used_are_counted():
    step = read_step(USED_ON_A_TPU, in_loop=False)
    rest = (2 + 1) * 4 + 2 * 16 * 2 + 2 * 2 * 32 * 2
    assert step.bytes == step.own_bytes == rest + 2 * 16 * 32 * 2
    other = read_step(USED_ON_A_TPU.replace("product_of_used", "another"), in_loop=False)
    assert other.bytes == other.own_bytes == rest + 8 * 16 * 32 * 2


# A weight of 1,000 numbers is brought onto the chip in two pieces, and a result of 10 goes back.
ON_A_TPU = """
%first_half (p0: f32[1000]) -> f32[500] {
  %p0 = f32[1000]{0} parameter(0)
  ROOT %part = f32[500]{0:T(128)S(1)} slice(%p0), slice={[0:500]}
}

ENTRY %main (w: f32[1000], x: f32[10]) -> f32[10] {
  %w = f32[1000]{0} parameter(0)
  %x = f32[10]{0:S(1)} parameter(1)
  %a = ((f32[1000]{0}), f32[500]{0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:500]}
  %b = ((f32[1000]{0}), f32[500]{0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[500:1000]}
  %c = f32[500]{0:S(1)} slice-done(%a)
  %d = f32[500]{0:S(1)} slice-done(%b)
  %all = f32[1000]{0:S(1)} custom-call(%c, %d), custom_call_target="ConcatBitcast"
  %half = f32[500]{0:S(1)} fusion(%w), kind=kLoop, calls=%first_half
  %on = f32[10]{0:S(1)} fusion(%all, %half, %x), kind=kLoop, calls=%mul
  %back = (f32[10]{0}, f32[10]{0:S(1)}, u32[]{:S(2)}) copy-start(%on)
  ROOT %y = f32[10]{0} copy-done(%back)
}

%mul (p0: f32[1000], p1: f32[500], p2: f32[10]) -> f32[10] {
  %p0 = f32[1000]{0} parameter(0)
  %p1 = f32[500]{0} parameter(1)
  %p2 = f32[10]{0} parameter(2)
  ROOT %r = f32[10]{0:S(1)} custom-call(%p0, %p1, %p2)
}
"""


def test_what_a_tpu_brings_onto_the_chip_is_read_from_memory():
    step = read_step(ON_A_TPU, in_loop=False)
    assert step.transfers == 3
    assert step.kernels == {"fusion": 2}  # no kernel puts two pieces together
    assert step.bytes == 2 * 500 * 4 + 500 * 4 + 10 * 4
    assert step.copied_bytes == 0


def test_a_loop_that_counts_says_how_many_turns_it_takes():
    condition = """%go_on (s: (s32[], f32[10])) -> pred[] {
  %s = (s32[], f32[10]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %most = s32[] constant(3)
  ROOT %less = pred[] compare(%n, %most), direction=LT
}

%body"""
    known = 'body=%inner, config={"known_trip_count":{"n":"3"}}'
    counted = TEXT.replace(known, "condition=%go_on, body=%inner").replace("%body", condition, 1)
    assert "known_trip_count" not in counted
    assert read_step(counted, in_loop=True) == read_step(TEXT, in_loop=True)
    by_two = counted.replace(
        "ROOT %t = (s32[], f32[10]) tuple(%n, %w)",
        "%two = s32[] constant(2)\n  %m = s32[] add(%n, %two)\n"
        "  ROOT %t = (s32[], f32[10]) tuple(%m, %w)",
    )
    assert by_two != counted
    assert read_step(by_two, in_loop=True).kernels["negate"] == 2  # 0 and 2
    until = counted.replace("direction=LT", "direction=NE")
    assert read_step(until, in_loop=True).kernels["negate"] == 1


def test_the_branches_of_a_choice_are_read():
    known = 'while(%pair), body=%inner, config={"known_trip_count":{"n":"3"}}'
    assert known in TEXT
    choice = "conditional(%slot, %pair, %pair), "
    several = choice + "branch_computations={%inner, %inner}"
    two = choice + "true_computation=%inner, false_computation=%inner"
    for branches in (several, two):
        assert read_step(TEXT.replace(known, branches), in_loop=True).kernels["negate"] == 2


def test_without_an_estimate_of_one_instruction_there_is_none():
    def cycles(*each):
        text = TEXT
        for name, number in zip(("%fused_row", "%fused_update"), each, strict=True):
            text = text.replace(f"calls={name}", f'calls={name}, {{"estimated_cycles":"{number}"}}')
        return read_step(text, in_loop=True).cycles

    assert cycles(100, 20) == 120
    assert cycles(100, 2**63 - 1) is None


def test_a_fusion_within_a_fusion_reads_its_part():
    outer = """%fused_outer (p0: f32[100,10], p1: s32[]) -> f32[10] {
  %p0 = f32[100,10]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %part = f32[10]{0} fusion(%p0, %p1), kind=kLoop, calls=%fused_row
}

%inner"""
    nested = TEXT.replace("kind=kLoop, calls=%fused_row", "kind=kOutput, calls=%fused_outer")
    nested = nested.replace("%inner", outer, 1)
    assert "calls=%fused_outer" in nested
    assert read_step(nested, in_loop=True) == read_step(TEXT, in_loop=True)


def test_an_exchange_within_several_fusions_is_one():
    """As a TPU has it: it begins in one fusion and ends in another, under one channel."""
    gather = "  %g = f32[20]{0} all-gather(%p1), channel_id=7, dimensions={0}\n"
    text = TEXT
    for name in ("p1: f32[10], p2: s32[]) -> f32[100,10] {", "p1: s32[]) -> f32[10] {"):
        assert name in text
        text = text.replace(f"{name}\n", f"{name}\n{gather}", 1)
    assert read_step(text, in_loop=True).exchanges == {"all-reduce": 1, "all-gather": 1}
    two = text.replace("channel_id=7", "channel_id=8", 1)
    assert read_step(two, in_loop=True).exchanges == {"all-reduce": 1, "all-gather": 2}


def test_a_program_without_a_loop_is_read_whole():
    step = read_step(TEXT, in_loop=False)
    assert step.exchanges == {"all-gather": 1, "all-reduce": 1}
    assert step.kernels["copy"] == 1


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("pred[8]", 8),
        ("s4[6]", 3),
        ("f8e4m3fn[5]{0}", 5),
        ("u32[]{:S(2)}", 0),  # on the chip
        ("bf16[12,64]{1,0:T(8,128)(2,1)}", 1536),
        ("(bf16[2,3]{1,0}, (f32[4], s32[]))", 12 + 16 + 4),
        ("token[]", 0),
    ],
)
def test_sizes_of_shapes(shape, size):
    assert size_of(shape) == size


def test_shapes_with_brackets_in_their_layouts_are_read():
    line = (
        "  ROOT %x.1 = (bf16[8]{0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%y.2), channel_id=1"
    )
    module = read_module(f"ENTRY %main (a: f32[]) -> f32[] {{\n{line}\n}}")
    (instruction,) = module["main"].values()
    assert instruction.opcode == "copy-start"
    assert instruction.operands == ("y.2",)
    assert instruction.is_root
