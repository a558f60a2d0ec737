"""Equal child modules are traced once: modules, arguments and what they read are compared as data.

A model's layers are run one by one on fake tensors, and what each reads is recorded: attributes by
a subclass that a module gets for the time of a call (`__class__`), globals by `sys.setprofile`
(read_sets). Equal calls become one node in the export (tracer), which is expanded by the body of
the first of them (expand). Gain: Llama-3-405B is captured in 8.4 s of CPU time instead of 47
(benchmarks/capture.py, without and with --full, one run on a busy machine of 2 cores).

How it is safe: classes, profiler, attributes, globals and buffers are given back when a call
ends, also by an exception. A call that writes state is refused, and a note says so. The last call
of every class is traced as well and must have the ops of the first; every key and read set is
compared once more in the export. Whatever does not agree, any other error, and a profiler that is
already active make capture trace every layer, as `full_capture=True` of CompileOptions does from
the start.
"""
