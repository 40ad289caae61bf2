"""Names of devices."""

import pytest

import backbone_surgery as bs
from backbone_surgery.planning.devices import DEVICES, find_devices


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("H100", "H100", 1),
        ("h100:8", "H100", 8),
        ("h100:2x8", "H100", 16),
        ("l4", "L4", 1),
        ("v5e", "v5e", 1),
        ("v5e:4x4", "v5e", 16),
        ("v5p:2x2x4", "v5p", 16),
        ("v5p:4x4x8", "v5p", 128),
        ("v6e:2x4", "v6e", 8),
    ],
)
def test_usual_names(name, kind, count):
    devices = find_devices(name)
    assert devices.device.name == kind
    assert devices.count == count


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h10", "Did you mean 'H100'"),
        ("b200", "expected one of A100, H100, H200, L4, v4, v5e, v5p, v6e"),
        ("v5e:16", "expected a slice that there is, 1x1, 2x2, 2x4, 4x4"),
        ("v5e:3x5", "expected a slice that there is, 1x1, 2x2, 2x4, 4x4"),
        ("v5p:4x4", "expected a slice that there is, 2x2x1, 2x2x2"),
        ("v5p:8x4x4", "multiples of 4 that do not get smaller"),
        ("v4:64x64x64", "multiples of 4"),
        ("h100:2x2x2", "expected numbers of GPUs, or of hosts and GPUs"),
        ("h100:0", "expected numbers of GPUs"),
        ("h100:", "expected numbers of GPUs"),
        ("v5e:4x4x", "expected a slice"),
    ],
)
def test_other_names_are_refused(name, words):
    with pytest.raises(bs.SurgeryError, match=words):
        find_devices(name)


def test_matrix_units_and_clocks_give_the_peak_that_google_states():
    """Peak bf16 FLOP/s = units x size^2 x 2 x clock."""
    peaks = {"v4": (8, 128, 275e12), "v5e": (4, 128, 197e12), "v5p": (8, 128, 459e12)}
    for name, (units, size, peak) in peaks.items():
        assert units * size**2 * 2 * DEVICES[name].clock == pytest.approx(peak, rel=0.01)
