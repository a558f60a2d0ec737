"""What instances read: first reads, tied parameters, values of other instances."""

from collections import Counter
from dataclasses import replace

from support.graphs.op_graphs import folded_stack

from meshfold.ir.op_graph import ParameterInfo, SourceKind
from meshfold.passes.graph.reads import program_reads
from meshfold.passes.graph.variants import split_regions


def test_every_source_is_read_first_once() -> None:
    folded = folded_stack(num_layers=3, tied=True)
    first: Counter[str] = Counter()
    for instance, reads in zip(folded.instances, program_reads(folded).instances, strict=True):
        slots = (*reads.first.parameters, *reads.first.buffers, *reads.first.inputs)
        first.update(instance.sources[i].name for i in slots)
    outside = {
        s.name for i in folded.instances for s in i.sources if s.kind is not SourceKind.VALUE
    }
    assert first == dict.fromkeys(outside, 1)


def test_values_and_ties_are_those_of_the_sources() -> None:
    folded = folded_stack(num_layers=3, tied=True)
    names: Counter[str] = Counter()
    for instance, reads in zip(folded.instances, program_reads(folded).instances, strict=True):
        for i, source in enumerate(instance.sources):
            is_value = source.kind is SourceKind.VALUE
            assert (i in reads.values) == is_value
            assert not is_value or reads.values[i] == (source.instance, source.output)
        names.update(reads.tied.values())
    assert names == {"first": 2}


def test_frozen_parameters_are_not_trained_and_unread_ones_are_known() -> None:
    folded = folded_stack(num_layers=1)
    frozen, *others = folded.parameters
    unread = ParameterInfo("unread", (3,), "float32")
    changed = replace(folded, parameters=(replace(frozen, requires_grad=False), *others, unread))
    reads = program_reads(changed)
    assert reads.unread == (unread,)
    trained = [
        instance.sources[i].name
        for instance, of in zip(changed.instances, reads.instances, strict=True)
        for i in of.first.trained
    ]
    assert sorted(trained) == sorted(p.name for p in others)


def test_splitting_regions_changes_no_reads() -> None:
    folded = folded_stack(num_layers=3)
    split = split_regions(folded, range(len(folded.instances)))
    reads = program_reads(folded)
    assert program_reads(split) == reads
    assert sum(reads.count_first(split).values()) == len(folded.instances)
    assert len(reads.count_first(split)) == len(split.regions)
