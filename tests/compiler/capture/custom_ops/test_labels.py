"""What probes prove of Functions."""

from support.models.functions import function_model

from meshfold.capture.pipeline import capture


def test_what_probes_prove_is_shared_and_nothing_else() -> None:
    """A norm mixes its last dim, a quantizer has a result for every row, and a mean loss is left
    whole: random targets would not show those that it leaves out."""
    graph = capture(*function_model(1)).graph
    ops = [op for region in graph.regions for op in region.graph.ops if op.custom]
    shared = {
        op.target.rpartition(":")[2]: (op.custom.shards, op.custom.is_linear)
        for op in ops
        if op.custom
    }
    everything = ("d0", "d1", "d2")
    assert shared == {
        "RmsNorm": (("d0", "d1"), True),
        "Quantize": (("d0", "d1"), True),
        "Gelu": (everything, True),
        "Clip": (everything, False),
        "Reverse": (everything, True),
        "LinearLoss": ((), False),
    }
    notes = "\n".join(graph.notes)
    assert "Gelu: ranks may share its dim 0, 1, 2, as probes show; its time is an estimate" in notes
    assert "LinearLoss: every rank runs it on unsharded values" in notes
