"""Smaller sizes for the fields of a Hugging Face configuration, of any model: one table of names.

    hidden_size 4096, 32 heads, 8 key-value heads, 32 layers -> 128, 16, 4, 4

What makes the program is kept: the ratio of heads to key-value heads (up to 4), that of the other
widths to the model's, one layer at least of every kind, experts, and whether counts and the
vocabulary are even, so that what cannot be cut over two ranks still cannot. Sizes only shrink, so a
small model stays as it is. A name that the table does not have stays, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]
Path = tuple[str, ...]

MOST_LAYERS = 4
MOST_HEADS = 4
"""Key-value heads, and heads for each of them."""
HEAD_DIM = 8
VOCABULARY = 512
MOST_EXPERTS = 4
MOST_CHANNELS = 64
"""Width of the widest stage of a model without heads."""
MOST_PIXELS = 64
WIDTH_STEP = 8
PATCHES = 4
"""Patches of an image, on a side."""

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads") + (
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_num_attention_heads",
    "decoder_num_attention_heads",
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_HEAD_DIMS = ("head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size", "v_head_dim") + (
    "qk_rope_head_dim",
    "qk_nope_head_dim",
)
_ROTARY_DIMS = ("rotary_dim",)
_OWN_WIDTHS = ("embed_dim", "hidden_size", "d_model", "n_embd", "emb_dim", "hidden_sizes", "dim")
"""Fields with the width of what goes from layer to layer; the first that is there counts."""
_WIDTHS = (
    *_OWN_WIDTHS,
    "embedding_size",
    "word_embed_proj_dim",
    "neck_hidden_sizes",
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "n_inner",
    "d_inner",
    "d_ff",
    "dff",
    "hidden_dim",
    "q_lora_rank",
    "kv_lora_rank",
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers") + (
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
)
# Which layers are of another kind: their indices.
_INDICES = ("mlp_only_layers", "moe_layers", "cross_attention_layers", "global_attn_layers")
_AT_MOST: Mapping[str, int] = (
    dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), MOST_EXPERTS
    )
    # Experts per token, groups of experts, and every how many layers there is another kind.
    | dict.fromkeys(
        ("num_experts_per_tok", "moe_top_k", "moe_k", "n_group", "decoder_sparse_step")
        + ("encoder_sparse_step", "sliding_window_pattern", "full_attention_interval")
        + ("global_attn_every_n_layers", "interleave_moe_layer_step", "no_rope_layer_interval"),
        2,
    )
    # Groups taken, and layers before the first one with experts.
    | dict.fromkeys(("topk_group", "first_k_dense_replace", "moe_layer_start_index"), 1)
)
_WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size")
_ROPES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Change:
    """A field's value before and after."""

    path: Path
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} {_text(self.before)} -> {_text(self.after)}"


def shrink(fields: Fields, *, sequence: int | None, new_sequence: int) -> tuple[Change, ...]:
    """What to change in a configuration. fields: with their defaults; sequence: of the example
    inputs, which attention windows shrink with (None: there is none)."""
    groups = list(_groups(fields))
    found = []
    for group in groups:
        sizes = _Sizes(group)
        for path, value in group.items():
            after = _window(path[-1], value, sequence, new_sequence)
            after = sizes.of(path, value) if after is None else after
            if after is not None and after != value:
                found.append(Change(path, value, after))
    return tuple(found)


def changed(fields: Fields, changes: Sequence[Change]) -> dict[str, Any]:
    """The fields with the changes made; those it has not are added."""
    new = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in fields.items()
    }
    for change in changes:
        _set(new, change.path, change.after)
    return new


def _set(fields: dict[str, Any], path: Path, value: Any) -> None:
    if len(path) == 1:
        fields[path[0]] = value
        return
    inner = dict(fields.get(path[0]) or {})
    _set(inner, path[1:], value)
    fields[path[0]] = inner


def _groups(fields: Fields, prefix: Path = ()) -> Iterator[dict[Path, Any]]:
    """The fields of each model in a configuration. Those of a part without a width of its own, as
    the feed-forward of DBRX, belong to the model around it."""
    own: dict[Path, Any] = {}
    for name, value in fields.items():
        path = (*prefix, name)
        is_part = isinstance(value, Mapping) and name.endswith("_config")
        if is_part and any(width in value for width in _OWN_WIDTHS):
            yield from _groups(value, path)
        elif is_part or name in _ROPES:
            own |= {(*path, inner): v for inner, v in (value or {}).items()}
        else:
            own[path] = value
    yield own


class _Sizes:
    """The new sizes of one model's fields."""

    def __init__(self, group: Mapping[Path, Any]) -> None:
        fields = {path[-1]: value for path, value in group.items()}
        self.fields = fields
        heads = _first(fields, _HEADS)
        self.key_heads = _first(fields, _KEY_HEADS)
        self.width = _first(fields, _OWN_WIDTHS)
        head_dim = _first(fields, _HEAD_DIMS) or (
            self.width / heads if self.width and heads else HEAD_DIM
        )
        self.head_dim = max(1, head_dim)
        self.factor = max(1.0, self._factor(heads))
        self.layers = _first(fields, _LAYERS) or 0
        self.kept = _kept_layers(fields, self.layers)

    def _factor(self, heads: int | None) -> float:
        """What widths are divided by."""
        if not self.width:
            return 1.0
        if not heads:
            widest = max(_numbers(self.fields.get("hidden_sizes")) or [self.width])
            return widest / MOST_CHANNELS
        smaller_head = max(1.0, self.head_dim / HEAD_DIM)
        # Heads of every stage, as Swin has them, stay.
        are_many = any(isinstance(self.fields.get(name), list | tuple) for name in _HEADS)
        return smaller_head if are_many else smaller_head * heads / self._heads(heads)

    def _heads(self, heads: int) -> int:
        """The new number of heads."""
        keys = self.key_heads or heads
        if heads % keys:
            return _few(heads, MOST_HEADS)
        groups = heads // keys
        return _few(keys, MOST_HEADS) * (min(groups, MOST_HEADS) if groups > 1 else 1)

    def of(self, path: Path, value: Any) -> Any:
        """The new value; None for a field that stays."""
        name = path[-1]
        if isinstance(value, bool) or value is None:
            return None
        if path[:-1] and path[-2] in _ROPES:
            return self._rope(value)
        if isinstance(value, list | tuple):
            return self._of_list(name, list(value))
        return self._of_number(name, value) if isinstance(value, int) else None

    def _of_number(self, name: str, value: int) -> int | None:
        if name in _HEADS:
            return self._heads(value)
        if name in _KEY_HEADS:
            return _few(value, MOST_HEADS)
        if name in _HEAD_DIMS:
            return min(value, HEAD_DIM)
        if name in _ROTARY_DIMS:
            return min(value, max(2, int(value * HEAD_DIM / self.head_dim) // 2 * 2))
        if name in _WIDTHS:
            return self._narrow(value)
        if name in _LAYERS:
            return len(self.kept) if value == self.layers else min(value, MOST_LAYERS)
        if name.endswith("vocab_size") or name == "vocab_size_per_layer_input":
            return min(value, VOCABULARY - value % 2)
        if name.endswith(("_token_id", "_token_index")):
            return _token(name, value)
        if name == "image_size":
            return self._image(value)
        return min(value, _AT_MOST[name]) if name in _AT_MOST else None

    def _of_list(self, name: str, value: list[Any]) -> list[Any] | None:
        if name.endswith("_token_id"):
            return [_token(name, v) for v in value]
        if name in _WIDTHS:
            return [self._narrow(v) for v in value]
        if name == "depths":
            return [min(v, 2) for v in value]
        if name in _INDICES:
            return [new for new, old in enumerate(self.kept) if old in value]
        if name == "attention_types":
            return [[kinds, max(1, MOST_LAYERS // len(kinds))] for kinds, _ in value[:1]]
        if self.layers > MOST_LAYERS and len(value) == self.layers:
            return [value[i] for i in self.kept]
        return None

    def _narrow(self, value: int) -> int:
        smaller = round(value / self.factor / WIDTH_STEP) * WIDTH_STEP
        return value if self.factor == 1 else min(value, max(WIDTH_STEP, smaller))

    def _rope(self, value: Any) -> Any:
        """Factors for every pair of a head's entries."""
        if not isinstance(value, list) or self.head_dim <= HEAD_DIM:
            return None
        return value[: max(1, int(len(value) * HEAD_DIM / self.head_dim))]

    def _image(self, value: int) -> int | None:
        """A few patches; what stages of layers halve again and again, more, and what they cut into
        windows stays."""
        if "depths" in self.fields:
            return None if "window_size" in self.fields else min(value, MOST_PIXELS)
        return min(value, PATCHES * (_first(self.fields, ("patch_size",)) or 16))


def _kept_layers(fields: Fields, count: int) -> tuple[int, ...]:
    """Layers that stay: the first of each kind, then the first ones."""
    if count <= MOST_LAYERS:
        return tuple(range(count))
    by_layer = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == count]
    by_layer += [
        [i in v for i in range(count)]
        for name, v in fields.items()
        if name in _INDICES and isinstance(v, list | tuple)
    ]
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([values[i] for values in by_layer]), i)
    first = sorted(kinds.values())
    # Where all differ, they are of one kind with other numbers.
    chosen = first if len(first) < count else []
    rest = [i for i in range(count) if i not in chosen]
    return tuple(sorted([*chosen, *rest[: max(0, MOST_LAYERS - len(chosen))]]))


def _window(name: str, value: Any, sequence: int | None, new_sequence: int) -> Any:
    """A window of attention, which cuts off as much of the new sequence as of the old."""
    if name not in _WINDOWS or not isinstance(value, int) or isinstance(value, bool):
        return None
    if sequence is None or value >= sequence:
        return None
    smaller = max(2, value * new_sequence // sequence // 2 * 2)
    return min(value, smaller)


def _few(count: int, most: int) -> int:
    """`count`, but at most `most`, odd if `count` is."""
    return count if count <= most else most - count % 2


def _token(name: str, value: int) -> int:
    """A token's number, in the vocabulary and its own."""
    return value if value < VOCABULARY // 2 else VOCABULARY - 2 - sum(map(ord, name)) % 64


def _first(fields: Fields, names: Sequence[str]) -> int | None:
    """The first of these fields that holds a number, or the first number that one holds."""
    for name in names:
        numbers = _numbers(fields.get(name))
        if numbers:
            return numbers[0]
    return None


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _text(value: Any) -> str:
    """A value as text for people: long lists by what is in them."""
    if not isinstance(value, list | tuple) or len(value) <= MOST_LAYERS:
        return str(value)
    return f"{len(value)} entries"
