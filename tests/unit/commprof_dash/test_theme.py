"""Test that the colors are distinguishable for everybody, on both backgrounds."""

from itertools import combinations

import pytest

from commprof import schema
from commprof_dash import theme

# Matrices that simulate full dichromacy on linear RGB: Machado, Oliveira and Fernandes, IEEE TVCG 15(6),
# 2009, severity 1.
DICHROMACY = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
COMPARED = ("all_reduce", "reduce", "reduce_scatter", "all_gather")


def linear(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(rgb):
    """Return CIE L*a*b* (D65) of linear RGB."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (max(0.0, sum(m * c for m, c in zip(row, rgb, strict=True))) for row in matrix)
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.95047, y, z / 1.08883)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def seen(colour, eyes):
    return lab([sum(m * c for m, c in zip(row, linear(colour), strict=True)) for row in DICHROMACY[eyes]])


def contrast(one, other):
    light, dark = sorted((theme.luminance(one), theme.luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_operation_has_a_colour_of_its_own():
    assert set(theme.OP_COLOURS) == set(schema.OPS)
    assert len(set(theme.OP_COLOURS.values())) == len(schema.OPS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_paper(scheme):
    named = [theme.STEP_COLOUR, theme.EXPOSED_COLOUR]
    colours = [*theme.OP_COLOURS.values(), *theme.SETTING_COLOURS, *theme.KIND_COLOURS, *named]
    weak = {
        c: round(contrast(c, theme.PAPER[scheme]), 2) for c in colours if contrast(c, theme.PAPER[scheme]) < 3
    }
    assert not weak


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_reads_on_the_paper(scheme):
    assert contrast(theme.TEXT[scheme], theme.PAPER[scheme]) >= 7
    assert contrast(theme.MUTED_TEXT[scheme], theme.PAPER[scheme]) >= 4.5


@pytest.mark.parametrize("colour", theme.OP_COLOURS.values())
def test_text_reads_on_the_bars(colour):
    assert contrast(theme.text_on(colour), colour) >= 4.5


@pytest.mark.parametrize("eyes", DICHROMACY)
def test_what_is_compared_stays_apart_for_all_eyes(eyes):
    for one, other in combinations(COMPARED, 2):
        first, second = seen(theme.OP_COLOURS[one], eyes), seen(theme.OP_COLOURS[other], eyes)
        distance = sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5
        assert distance > 20, f"{one} and {other} are {distance:.0f} apart for {eyes}"


def test_the_templates_differ_and_neither_paints_the_card():
    light, dark = theme.template("light"), theme.template("dark")
    assert light.layout.font.color != dark.layout.font.color
    assert light.layout.paper_bgcolor == dark.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_an_unknown_scheme_is_light():
    assert [theme.scheme_of(value) for value in ("dark", "light", None, "sepia")] == [
        "dark",
        "light",
        "light",
        "light",
    ]
