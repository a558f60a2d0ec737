"""Models in plain torch, as people write them: language, recurrent and state space models."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.entry import BATCH, Built, Entry, fits, tokens

VOCABULARY, WIDTH, LENGTH = 64, 32, 8


class CausalAttention(nn.Module):
    """Fused q, k, v as in nanoGPT."""

    def __init__(self, heads: int = 4, *, masked: bool = False) -> None:
        super().__init__()
        self.heads, self.masked = heads, masked
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if masked:
            ones = torch.ones(LENGTH, LENGTH)
            self.register_buffer("bias", torch.tril(ones).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        if self.masked:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = functional.softmax(scores, dim=-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    """Pre-norm residual block around a mixer of the sequence."""

    def __init__(self, mixer: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.mixer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mixer
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(nn.Module):
    """Embeddings, blocks, a head that may be tied."""

    def __init__(self, blocks: list[nn.Module], *, tied: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.ln_f = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(0, x.size(1), dtype=torch.long, device=x.device)
        y = self.wte(x) + self.wpe(position)
        for block in self.blocks:
            y = block(y)
        return self.lm_head(self.ln_f(y))


class RecurrentModel(nn.Module):
    def __init__(self, kind: str, **fields: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True, **fields)
        ways = 2 if fields.get("bidirectional") else 1
        self.head = nn.Linear(ways * WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(self.embed(x))
        return self.head(y)


class CellModel(nn.Module):
    """A cell, step by step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), getattr(nn, kind)(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y, state, states = self.embed(x), None, []
        for step in range(x.size(1)):
            state = self.cell(y[:, step], state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(states, dim=1))


class Seq2Seq(nn.Module):
    """GRU encoder and decoder with additive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.energy, self.head = nn.Linear(WIDTH, 1), nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        memory, hidden = self.encoder(self.embed(x))
        states, _ = self.decoder(self.embed(x.flip(1)), hidden)
        joined = torch.tanh(self.query(states).unsqueeze(2) + self.key(memory).unsqueeze(1))
        weights = self.energy(joined).squeeze(-1).softmax(-1)
        return self.head(torch.cat([states, weights @ memory], -1))


class LinearAttention(nn.Module):
    """Causal linear attention by running sums."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        state = torch.einsum("blhd,blhe->blhde", k, v).cumsum(1)
        scale = 1 / (torch.einsum("blhd,blhd->blh", q, k.cumsum(1)) + 1e-6)
        return self.out(torch.einsum("blhd,blhde,blh->blhe", q, state, scale).flatten(2))


class S4D(nn.Module):
    """A diagonal state space as a long convolution by FFT."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(WIDTH) - 3)
        self.c = nn.Parameter(torch.randn(WIDTH, states, 2))
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, states)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(states).repeat(WIDTH, 1).float())
        self.d, self.out = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        dt, c = torch.exp(self.log_dt), torch.view_as_complex(self.c)
        a = -torch.exp(self.log_a_real) + 1j * self.a_imag
        dta = a * dt.unsqueeze(-1)
        k = torch.exp(dta.unsqueeze(-1) * torch.arange(length, device=x.device))
        c = c * (torch.exp(dta) - 1.0) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, k).real
        u = x.transpose(1, 2)
        y = torch.fft.irfft(
            torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(u, n=2 * length), n=2 * length
        )[..., :length]
        y = functional.gelu(y + u * self.d.unsqueeze(-1)).transpose(1, 2)
        return functional.glu(self.out(y), dim=-1)


class TimeMix(nn.Module):
    """RWKV-4's mixing of time, the running sum written as a product with decays."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.mix = nn.ParameterList([nn.Parameter(torch.rand(1, 1, WIDTH)) for _ in range(3)])
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        k, v, r = (
            layer(x * m + before * (1 - m))
            for layer, m in zip((self.key, self.value, self.receptance), self.mix, strict=True)
        )
        length = x.shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        w = torch.exp(-(distance[..., None] - 1) * torch.exp(self.decay))
        w = torch.where(distance[..., None] > 0, w, torch.zeros_like(w))
        w = w + torch.eye(length, dtype=x.dtype)[..., None] * torch.exp(self.first)
        weights = torch.exp(k.clamp(max=30))
        top = torch.einsum("tsc,bsc->btc", w.to(x.dtype), weights * v)
        return self.output(torch.sigmoid(r) * top / torch.einsum("tsc,bsc->btc", w, weights))


class SelectiveScan(nn.Module):
    """Mamba's layer with its scan in log space."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.bc, self.dt = nn.Linear(WIDTH, 2 * states), nn.Linear(WIDTH, WIDTH)
        self.a_log = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u, gate = self.in_proj(x).chunk(2, -1)
        u = functional.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        b, c = self.bc(u).chunk(2, -1)
        dt = functional.softplus(self.dt(u))
        decay = (dt.unsqueeze(-1) * -torch.exp(self.a_log)).cumsum(1)
        inputs = (dt * u).unsqueeze(-1) * b.unsqueeze(2)
        state = torch.exp(decay) * (inputs * torch.exp(-decay)).cumsum(1)
        y = torch.einsum("blds,bls->bld", state, c)
        return self.out_proj(y * functional.silu(gate))


class MixtureOfExperts(nn.Module):
    """All experts of all tokens, weighted by the best two."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        values, ids = self.router(x).topk(2, dim=-1)
        gates = torch.zeros_like(self.router(x)).scatter(-1, ids, values.softmax(-1))
        y = functional.silu(torch.einsum("bld,edh->belh", x, self.up))
        return torch.einsum("belh,ehd,ble->bld", y, self.down, gates)


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class GatedSpatial(nn.Module):
    """gMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv1d(LENGTH, LENGTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = functional.gelu(self.up(x)).chunk(2, dim=-1)
        return self.down(u * self.mix(self.norm(v)))


class DilatedConvolution(nn.Module):
    """WaveNet's gate."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.pad = dilation
        self.filter, self.gate = (nn.Conv1d(WIDTH, WIDTH, 2, dilation=dilation) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.pad(x.transpose(1, 2), (self.pad, 0))
        return (torch.tanh(self.filter(y)) * torch.sigmoid(self.gate(y))).transpose(1, 2)


class TorchTransformer(nn.Module):
    """nn.Transformer as it comes, dropout and all."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, batch_first=True, **fields)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        y = self.transformer(self.embed(x), self.embed(x.roll(1, 1)), tgt_mask=mask)
        return self.head(y)


def _encoder(**fields: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, **fields)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(WIDTH, VOCABULARY),
    )


class Rotary(nn.Module):
    """Llama's attention with complex numbers, as Meta writes it."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, size = heads, WIDTH // heads
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wkv = nn.Linear(WIDTH, WIDTH, bias=False)
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size))
        self.register_buffer("angles", torch.outer(torch.arange(LENGTH).float(), frequencies))

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        unit = torch.polar(torch.ones_like(self.angles), self.angles)[None, :, None]
        return torch.view_as_real(pairs * unit).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.rotate(self.wq(x).view(batch, length, self.heads, -1)).transpose(1, 2)
        k, v = self.wkv(x).view(batch, length, 2, self.heads // 2, -1).unbind(2)
        k, v = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (self.rotate(k), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def _language(name: str, *mixers: type[nn.Module] | object) -> Entry:
    def build() -> Built:
        return tokens(LanguageModel([Block(make()) for make in mixers]))  # type: ignore[operator]

    return Entry("torch", name, build)


def _decoder_only(name: str, build: object) -> Entry:
    return Entry("torch", name, lambda: tokens(build()))  # type: ignore[operator]


LANGUAGE = (
    _language("nanogpt", CausalAttention, CausalAttention),
    _language("mingpt", *[lambda: CausalAttention(masked=True)] * 2),
    Entry(
        "torch",
        "nanogpt_with_dropout",
        lambda: tokens(LanguageModel([Block(CausalAttention(), 0.1) for _ in range(2)])),
    ),
    _language("meta_llama", Rotary, Rotary),
    _language("linear_attention", LinearAttention, LinearAttention),
    _language("s4d", S4D, S4D),
    _language("rwkv", TimeMix, TimeMix),
    _language("mamba_scan", SelectiveScan, SelectiveScan),
    _language("fnet_plain", Fourier, Fourier),
    _language("gmlp_plain", GatedSpatial, GatedSpatial),
    _language("hybrid", SelectiveScan, CausalAttention, SelectiveScan, CausalAttention),
    _language("moe_dense", *[lambda: nn.Sequential(CausalAttention(), MixtureOfExperts())] * 2),
    _language("wavenet", *[lambda d=d: DilatedConvolution(d) for d in (1, 2)]),
    _decoder_only("lstm_lm", lambda: RecurrentModel("LSTM", num_layers=2)),
    _decoder_only("lstm_lm_dropout", lambda: RecurrentModel("LSTM", num_layers=2, dropout=0.2)),
    _decoder_only("gru_lm", lambda: RecurrentModel("GRU", num_layers=2)),
    _decoder_only("rnn_lm", lambda: RecurrentModel("RNN", num_layers=2)),
    _decoder_only("bilstm_tagger", lambda: RecurrentModel("LSTM", bidirectional=True)),
    _decoder_only("lstm_cell", lambda: CellModel("LSTMCell")),
    _decoder_only("gru_cell", lambda: CellModel("GRUCell")),
    _decoder_only("seq2seq", Seq2Seq),
    _decoder_only("transformer", TorchTransformer),
    _decoder_only("transformer_pre_norm", lambda: TorchTransformer(norm_first=True, dropout=0.0)),
    _decoder_only("transformer_encoder", _encoder),
    _decoder_only("transformer_encoder_gelu", lambda: _encoder(activation="gelu", dropout=0.0)),
)
SIGNALS = (
    Entry(
        "torch",
        "temporal_convolutions",
        lambda: fits(
            nn.Sequential(*(nn.Conv1d(8, 8, 3, padding=2**k, dilation=2**k) for k in range(3))),
            torch.randn(BATCH, 8, 16),
            BATCH,
            8,
            16,
        ),
    ),
)
MODELS = (*LANGUAGE, *SIGNALS)
