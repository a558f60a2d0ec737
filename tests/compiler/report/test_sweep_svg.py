"""A sweep as a drawing."""

import xml.etree.ElementTree as xml

from support.programs.plans import rows_of_rates

from meshfold.report.sweep_svg import sweep_svg

NAME = "{http://www.w3.org/2000/svg}"


def test_points_are_where_the_rates_are() -> None:
    root = xml.fromstring(sweep_svg(rows_of_rates({8: 500, 16: 1000, 32: None}), "a < b & c"))
    circles = root.findall(f"{NAME}circle")
    (x_8, y_8), (x_16, y_16) = ((float(c.get("cx", "")), float(c.get("cy", ""))) for c in circles)
    floor, top = 360, 40
    assert y_16 == top and y_8 == (floor + top) / 2  # half the rate, half as high
    assert (x_8, x_16) == (90, 375)  # logarithmic: 16 is halfway between 8 and 32
    texts = [text.text for text in root.findall(f"{NAME}text")]
    assert "a < b & c: tokens per second" in texts and "dp8, 500" in texts
    assert len(root.findall(f"{NAME}path")) == 2  # the axes, and a cross for what has no plan


def test_one_point_and_no_plan() -> None:
    root = xml.fromstring(sweep_svg(rows_of_rates({8: None}), "t"))
    assert not root.findall(f"{NAME}circle")
    assert xml.fromstring(sweep_svg(rows_of_rates({8: 5}), "t")).findall(f"{NAME}circle")
