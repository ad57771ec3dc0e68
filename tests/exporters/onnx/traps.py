# ruff: noqa: E501  (a graph reads best in its own lines)
"""Graphs that break converters: every trap of the field's bug trackers that can be built by hand.

A trap is a graph, its weights and fresh inputs; ``FOREIGN`` has them by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from tests.exporters.onnx.onnx_files import parsed

Random = np.random.Generator
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Trap:
    """``inputs(random, rows)`` draws fresh samples. ``most_kept``: FP32 nodes beyond the lists that are allowed."""

    name: str
    text: str
    weights: Callable[[Random], Arrays]
    inputs: Callable[[Random, int], Arrays]
    opset: int = 17
    most_kept: int = 0
    levels: tuple[str, ...] = ("O1", "O3")
    limit_u: float = 4.0  # more where half's mantissa itself has heavy tails on so small a net
    more: str = ""
    max_batch_size: int = 8

    def model(self) -> ModelProto:
        return parsed(self.text, self.weights(np.random.default_rng(7)), self.opset, self.more)


def f32(array: object) -> np.ndarray:
    return np.asarray(array, np.float32)


def normal(random: Random, *shape: int, scale: float = 1.0) -> np.ndarray:
    return f32(random.standard_normal(shape) * scale)


def square(random: Random) -> Arrays:
    return {"w": normal(random, 8, 8, scale=0.25)}


def rows_of(*shape: int, scale: float = 1.0) -> Callable[[Random, int], Arrays]:
    return lambda random, rows: {"x": normal(random, rows, *shape, scale=scale)}


def none(_: Random) -> Arrays:
    return {}


_TRAPS = [
    Trap(
        "mlp",
        "g (float[n,8] x) => (float[n,4] y) { h = Gemm(x, w, b) r = Relu(h) z = MatMul(r, v) y = Softmax<axis=-1>(z) }",
        lambda r: {"w": normal(r, 8, 16, scale=0.35), "b": normal(r, 16), "v": normal(r, 16, 4, scale=0.25)},
        rows_of(8),
    ),
    Trap(
        "overflow between two nodes",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = Mul(h, c) b = Mul(a, c) d = Div(b, k) y = MatMul(d, w) }",
        lambda r: square(r) | {"c": f32(400.0), "k": f32(60000.0)},
        rows_of(8),
        most_kept=3,
    ),
    Trap(
        "a sum beyond half",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) p = Abs(h) q = Mul(p, c)"
        " axes = Constant<value_ints=[-1]>() s = ReduceMean<axes=[-1]>(q) t = Mul(s, big) u = Div(p, t) y = MatMul(u, w) }",
        lambda r: square(r) | {"c": f32(5000.0), "big": f32(40.0)},
        rows_of(8),
        most_kept=5,
    ),
    Trap(
        "masks with fully masked rows",
        "g (float[n,6,8] x, int64[n,6] mask) => (float[n,6,8] y) { q = MatMul(x, w) k = MatMul(x, v)"
        " kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) sc = Mul(s, scale) m = Cast<to=1>(mask) inv = Sub(one, m)"
        " neg = Mul(inv, lowest) ax = Constant<value_ints=[1]>() bias = Unsqueeze(neg, ax) sm = Add(sc, bias)"
        " p = Softmax<axis=-1>(sm) y = MatMul(p, x) }",
        lambda r: {
            "w": normal(r, 8, 8, scale=0.35), "v": normal(r, 8, 8, scale=0.35), "scale": f32(0.35),
            "one": f32(1.0), "lowest": f32(np.finfo(np.float32).min),
        },
        lambda r, n: {"x": normal(r, n, 6, 8), "mask": _masks(r, n, 6)},
        most_kept=1,
    ),
    Trap(
        "a Where with -1e9",
        "g (float[n,6,8] x, bool[n,6] mask) => (float[n,6,8] y) { q = MatMul(x, w) xt = Transpose<perm=[0,2,1]>(x)"
        " s = MatMul(q, xt) ax = Constant<value_ints=[1]>() m = Unsqueeze(mask, ax) sm = Where(m, s, low)"
        " p = Softmax<axis=-1>(sm) y = MatMul(p, x) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.2), "low": f32(-1e9)},
        lambda r, n: {"x": normal(r, n, 6, 8), "mask": _masks(r, n, 6) > 0},
        most_kept=1,
    ),
    Trap(
        "a Where with minus infinity",
        "g (float[n,6,8] x, bool[n,6] mask) => (float[n,6,8] y) { q = MatMul(x, w) xt = Transpose<perm=[0,2,1]>(x)"
        " s = MatMul(q, xt) ax = Constant<value_ints=[1]>() m = Unsqueeze(mask, ax) sm = Where(m, s, low)"
        " p = Softmax<axis=-1>(sm) y = MatMul(p, x) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.2), "low": f32(-np.inf)},
        lambda r, n: {"x": normal(r, n, 6, 8), "mask": _masks(r, n, 6, least=1) > 0},
        most_kept=1,  # of sixteen rows whose answers are all small one product errs by about 4u
    ),
    Trap(
        "islands by Cast",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) f = Cast<to=1>(h) e = Mul(f, f) s = Sqrt(e)"
        " i = Cast<to=9>(x) back = Cast<to=1>(i) z0 = Add(back, h) z = Add(z0, s) y = MatMul(z, w) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.25)},
        rows_of(8, scale=3.0),
        most_kept=2,
    ),
    Trap(
        "a lookup and a TopK",
        "g (int64[n,5] ids) => (float[n,3] best, int64[n,3] which) { e = Gather(table, ids) axes = Constant<value_ints=[1]>()"
        " m = ReduceSum<keepdims=0>(e, axes) s = MatMul(m, items) k = Constant<value_ints=[3]>() best, which = TopK(s, k) }",
        lambda r: {"table": _signed(r, 2000, 8), "items": _apart(8, 20)},
        lambda r, n: {"ids": r.integers(0, 2000, (n, 5))},
    ),
    Trap(
        "epsilons under a root, zero and tiny rows",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) q = Mul(h, h) m = ReduceMean<axes=[-1]>(q) e = Add(m, eps)"
        " s = Sqrt(e) d = Div(h, s) y = MatMul(d, w) }",
        lambda r: square(r) | {"eps": f32(1e-8)},
        lambda r, n: {"x": _with_tiny_rows(normal(r, n, 8))},
        most_kept=6,
    ),
    Trap(
        "an epsilon by Clip",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) n2 = ReduceL2<axes=[-1], keepdims=1>(h) c = Clip(n2, eps)"
        " d = Div(h, c) y = MatMul(d, w) }",
        lambda r: square(r) | {"eps": f32(1e-12)},
        lambda r, n: {"x": _with_tiny_rows(normal(r, n, 8), tiny=0.02)},
        most_kept=1,
    ),
    Trap(
        "an If that captures",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) axes = Constant<value_ints=[0,1]>()"
        " t = ReduceSum<keepdims=0>(x, axes) c = Greater(t, zero) z = If(c) <"
        " then_branch = a () => (float[n,8] one) { k = Constant<value = float {0.5}>() d = Mul(h, k) one = MatMul(d, w) },"
        " else_branch = b () => (float[n,8] two) { k = Constant<value = float {2.0}>() d = Add(x, k) two = Tanh(d) } >"
        " y = MatMul(z, w) }",
        lambda r: square(r) | {"zero": f32(0.0)},
        rows_of(8),
        max_batch_size=1,
    ),
    Trap(
        "an If whose branch is a constant",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) axes = Constant<value_ints=[0,1]>()"
        " t = ReduceSum<keepdims=0>(x, axes) c = Greater(t, zero) z = If(c) <"
        " then_branch = a () => (float[8] one) { one = Constant<value = float[8] {1,2,3,4,5,6,7,8}>() },"
        " else_branch = b () => (float[8] two) { two = Identity(v) } > s = Add(h, z) y = MatMul(s, w) }",
        lambda r: square(r) | {"zero": f32(0.0), "v": normal(r, 8)},
        rows_of(8),
        max_batch_size=1,
    ),
    Trap(
        "a Loop with FP32 state",
        "g (float[n,8] x) => (float[n,8] y, float[t,n,8] steps) { n4 = Constant<value_int=4>() go = Constant<value = bool {1}>()"
        " last, steps = Loop(n4, go, x) < body = b (int64 i, bool c, float[n,8] s) => (bool c2, float[n,8] s2, float[n,8] o)"
        " { c2 = Identity(c) m = MatMul(s, w) s2 = Add(m, x) o = Tanh(s2) } > y = MatMul(last, w) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.2)},
        rows_of(3, 8),
        most_kept=1,  # of sixteen rows whose answers are all small one product errs by about 4u
        max_batch_size=0,
    ),
    Trap(
        "a Loop whose state starts as zeros",
        "g (float[n,8] x) => (float[n,8] y) { n3 = Constant<value_int=3>() go = Constant<value = bool {1}>() sh = Shape(x)"
        " z = ConstantOfShape<value = float[1] {0.0}>(sh) last = Loop(n3, go, z) <"
        " body = b (int64 i, bool c, float[n,8] s) => (bool c2, float[n,8] s2)"
        " { c2 = Identity(c) h = MatMul(x, w) a = Add(s, h) r = Relu(a) s2 = MatMul(r, w) } > y = Relu(last) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.15)},
        rows_of(8),
        most_kept=1,  # of sixteen rows whose answers are all small one product errs by about 4u
    ),
    Trap(
        "a Loop that makes its state FP32",
        "g (float[n,8] x) => (float[n,8] y) { n3 = Constant<value_int=3>() go = Constant<value = bool {1}>() h = MatMul(x, w)"
        " last = Loop(n3, go, h) < body = b (int64 i, bool c, float[n,8] s) => (bool c2, float[n,8] s2)"
        " { c2 = Identity(c) r = Relu(s) s2 = Softmax<axis=-1>(r) } > y = MatMul(last, w) }",
        square,
        rows_of(8),
    ),
    Trap(
        "a Scan",
        "g (float[5,8] x) => (float[8] last, float[5,8] all) { last, all = Scan<num_scan_inputs=1, body = b (float[8] s, float[8] row)"
        " => (float[8] s2, float[8] o) { m = MatMul(row, w) d = Mul(s, keep) s2 = Add(m, d) o = Tanh(s2) }>(start, x) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.15)} | {"start": f32(np.zeros(8)), "keep": f32(0.5)},
        lambda r, n: {"x": normal(r, n, 5, 8)},
        max_batch_size=0,
    ),
    Trap(
        "an If in a Loop",
        "g (float[n,8] x) => (float[n,8] y) { n4 = Constant<value_int=4>() go = Constant<value = bool {1}>() h = MatMul(x, w)"
        " last = Loop(n4, go, h) < body = b (int64 i, bool c, float[n,8] s) => (bool c2, float[n,8] s2) { c2 = Identity(c)"
        " two = Constant<value_int=2>() odd = Less(i, two) s2 = If(odd) < then_branch = a () => (float[n,8] p)"
        " { q = MatMul(s, w) p = Add(q, h) }, else_branch = e () => (float[n,8] p) { q = Mul(s, s) p = Sub(x, q) } > } >"
        " y = MatMul(last, w) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.15)},
        rows_of(8, scale=0.5),
    ),
    Trap(
        "an LSTM",
        "g (float[n,5,4] x) => (float[n,6] y) { t = Transpose<perm=[1,0,2]>(x) s, h, c = LSTM<hidden_size=6>(t, wi, wr, b)"
        " a = Constant<value_ints=[0]>() q = Squeeze(h, a) y = Gemm(q, v) }",
        lambda r: {
            "wi": normal(r, 1, 24, 4, scale=0.5), "wr": normal(r, 1, 24, 6, scale=0.4),
            "b": normal(r, 1, 48, scale=0.3), "v": normal(r, 6, 6, scale=0.4),
        },
        rows_of(5, 4),
    ),
    Trap(
        "a NonMaxSuppression at the end",
        "g (float[1,20,4] boxes, float[1,20,8] feats) => (int64[k,3] picked, float[1,1,20] scores) { s = MatMul(feats, v)"
        " t = Transpose<perm=[0,2,1]>(s) scores = Sigmoid(t) m = Constant<value_ints=[5]>()"
        " picked = NonMaxSuppression(boxes, scores, m, iou, thr) }",
        lambda r: {"v": normal(r, 8, 1), "iou": f32([0.5]), "thr": f32([0.0])},
        lambda r, n: {"boxes": _boxes(r, n), "feats": _spread(r, n)},
        max_batch_size=0,
    ),
    Trap(
        "a norm whose squares overflow",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) b = Mul(h, c) m = ReduceMean<axes=[-1]>(b) d = Sub(b, m)"
        " q = Mul(d, d) v = ReduceMean<axes=[-1]>(q) e = Add(v, eps) s = Sqrt(e) o = Div(d, s) y = MatMul(o, w) }",
        lambda r: square(r) | {"c": f32(300.0), "eps": f32(1e-5)},
        rows_of(8),
        most_kept=6,
    ),
    Trap(
        "Range and CumSum",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = Constant<value = float {0.0}>() b = Constant<value = float {8.0}>()"
        " d = Constant<value = float {1.0}>() r = Range(a, b, d) k = Mul(r, c) p = Add(h, k) ax = Constant<value_int=1>()"
        " s = CumSum(p, ax) y = MatMul(s, w) }",
        lambda r: square(r) | {"c": f32(0.1)},
        rows_of(8),
    ),
    Trap(
        "convolutions and batch norm",
        "g (float[n,3,8,8] x) => (float[n,5] y) { c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, k, kb)"
        " b = BatchNormalization(c, s, o, m, v) r = Relu(b) p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)"
        " g = GlobalAveragePool(p) f = Flatten(g) y = Gemm<transB=1>(f, w, wb) }",
        lambda r: {
            "k": normal(r, 6, 3, 3, 3, scale=0.3), "kb": normal(r, 6), "s": f32(r.uniform(0.5, 2, 6)),
            "o": normal(r, 6), "m": normal(r, 6), "v": f32(r.uniform(0.1, 2, 6)),
            "w": normal(r, 5, 6), "wb": normal(r, 5),
        },
        rows_of(3, 8, 8),
    ),
    Trap(
        "one value read by two FP32 nodes",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = Softmax<axis=-1>(h) b = Exp(h) s = Mul(a, b) y = MatMul(s, w) }",
        lambda r: {"w": normal(r, 8, 8, scale=0.1)},
        rows_of(8, scale=0.5),
    ),
    Trap(
        "an initialiser with readers of both kinds",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) e = Softmax<axis=-1>(h) ax = Constant<value_ints=[1]>()"
        " u = Unsqueeze(e, ax) m = Mul(u, w) f = ReduceMean<axes=[2], keepdims=0>(m) a = Mul(x, b) c = Mul(h, b)"
        " d = Add(a, c) s = Add(d, f) y = MatMul(s, w) }",
        lambda r: square(r) | {"b": normal(r, 8)},
        rows_of(8),
    ),
    Trap(
        "sines of positions to 4095",
        "g (float[n,16,8] x, int64[n,16] pos) => (float[n,16,8] y) { f = Cast<to=1>(pos) ax = Constant<value_ints=[2]>()"
        " u = Unsqueeze(f, ax) a = Mul(u, freq) s = Sin(a) c = Cos(a) pe = Concat<axis=-1>(s, c) h = MatMul(x, w) z = Add(h, pe)"
        " y = MatMul(z, w) }",
        lambda r: square(r) | {"freq": f32([1.0, 0.1, 0.01, 0.001])},
        lambda r, n: {"x": normal(r, n, 16, 8), "pos": r.integers(0, 4096, (n, 16))},
    ),
    Trap(
        "sines of a constant table",
        "g (float[n,16,8] x) => (float[n,16,8] y) { s = Sin(table) h = MatMul(x, w) z = Add(h, s) y = MatMul(z, w) }",
        lambda r: square(r) | {"table": f32(r.integers(0, 4096, (16, 8)))},
        rows_of(16, 8),
    ),
    Trap(
        "large logits",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) k = Mul(h, c) e = Exp(k) ax = Constant<value_ints=[-1]>()"
        " s = ReduceSum(e, ax) p = Div(e, s) y = MatMul(p, w) }",
        lambda r: square(r) | {"c": f32(3.0)},
        rows_of(8),
        most_kept=3,
        limit_u=8.0,
    ),
    Trap(
        "a long sum",
        "g (float[n,4096] x) => (float[n,1] y) { a = Abs(x) b = Mul(a, c) ax = Constant<value_ints=[1]>() s = ReduceSum(b, ax)"
        " d = Div(s, k) y = MatMul(d, w) }",
        lambda r: {"c": f32(100.0), "k": f32(4096.0), "w": f32([[0.7]])},
        rows_of(4096),
        most_kept=2,
    ),
    Trap(
        "tiny and huge initialisers",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = Mul(h, tiny) b = Mul(a, huge) y = MatMul(b, w) }",
        lambda r: square(r) | {"tiny": f32(-1e-9), "huge": f32(1e9)},
        rows_of(8),
        most_kept=2,
    ),
    Trap(
        "a Resize with scales",
        "g (float[n,3,8,8] x) => (float[n,3,16,16] y) { c = Conv<kernel_shape=[1,1]>(x, k)"
        " u = Resize<mode=\"linear\">(c, , scales) y = Conv<kernel_shape=[1,1]>(u, k) }",
        lambda r: {"k": normal(r, 3, 3, 1, 1, scale=0.5), "scales": f32([1, 1, 2, 2])},
        rows_of(3, 8, 8),
    ),
    Trap(
        "a Resize to sizes computed in float",
        "g (float[n,3,41,25] x) => (float[n,3,h2,w2] y) { c = Conv<kernel_shape=[1,1]>(x, k) s = Shape(c)"
        " f = Cast<to=1>(s) t = Mul(f, ratio) fl = Floor(t) sz = Cast<to=7>(fl)"
        " u = Resize<mode=\"nearest\">(c, , , sz) y = Conv<kernel_shape=[1,1]>(u, k) }",
        lambda r: {"k": normal(r, 3, 3, 1, 1, scale=0.5), "ratio": f32([1, 1, 51.26, 1.0])},
        rows_of(3, 41, 25),
    ),
    Trap(
        "names that are taken already",
        "g (float[n,8] x) => (float[n,8] y) { x__half = MatMul(x, w) h__half_2 = Softmax<axis=-1>(x__half) w__half = Relu(x__half)"
        " h__half = Mul(h__half_2, w__half) y__half = MatMul(h__half, w) y = Relu(y__half) }",
        lambda r: {"w": np.abs(normal(r, 8, 8, scale=0.25))},
        rows_of(8, scale=0.25),
    ),
    Trap(
        "an output that is read inside",
        "g (float[n,8] x) => (float[n,8] y, float[n,8] h, float[n,8] s) { h = MatMul(x, w) s = Softmax<axis=-1>(h) r = Mul(h, h)"
        " y = MatMul(r, w) }",
        square,
        rows_of(8),
        most_kept=1,  # one product errs by 3.6u on a perturbed sample: 0.9 of the limit, as for a module
    ),
    Trap(
        "constants as outputs, double, integers and booleans",
        "g (float[n,8] x) => (float[n,8] y, double[n,8] d, bool[n,8] b, int64[n] i, float[8] k) { h = MatMul(x, w) d = Cast<to=11>(x)"
        " d2 = Mul(d, d) back = Cast<to=1>(d2) b = Greater(x, zero) i = ArgMax<axis=1, keepdims=0>(x) z = Add(h, back)"
        " q = Where(b, z, zero) y = MatMul(q, w) k = Constant<value = float[8] {1,2,3,4,5,6,7,8}>() }",
        lambda r: square(r) | {"zero": f32(0.0)},
        rows_of(3, 8),
        max_batch_size=0,
    ),
    Trap(
        "a function",
        "g (float[n,8] x) => (float[n,8] y) { h = my.Block<alpha=0.5>(x, w) y = my.Block<alpha=2.0>(h, w) }"
        ' <domain: "my", opset_import: ["" : 17]> Block <alpha> (a, b) => (c) { m = MatMul(a, b)'
        " k = Constant<value_float: float = @alpha>() s = Mul(m, k) c = Tanh(s) }",
        square,
        rows_of(8),
        more=', "my" : 1',
    ),
    Trap(
        "opset 11",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) s = ReduceSum<axes=[1], keepdims=1>(h) q = Squeeze<axes=[1]>(s)"
        " u = Unsqueeze<axes=[1]>(q) c = Clip(u, lo, hi) z = Mul(h, c) y = Softmax<axis=1>(z) }",
        lambda r: square(r) | {"lo": f32(0.1), "hi": f32(1.0)},
        rows_of(8),
        opset=11,
    ),
    Trap(
        "an op of another domain",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = com.microsoft.Gelu(h) y = MatMul(a, w) }",
        square,
        rows_of(8),
        most_kept=1,  # of sixteen rows whose answers are all small one product errs by about 4u
        more=', "com.microsoft" : 1',
    ),
    Trap(
        "a deep residual stack",
        "g (float[n,16] x) => (float[n,16] y) { h0 = MatMul(x, w) "
        + " ".join(
            f"q{i} = Mul(h{i}, h{i}) v{i} = ReduceMean<axes=[-1]>(q{i}) e{i} = Add(v{i}, eps) s{i} = Sqrt(e{i}) "
            f"d{i} = Div(h{i}, s{i}) m{i} = MatMul(d{i}, w) t{i} = Tanh(m{i}) h{i + 1} = Add(h{i}, t{i})"
            for i in range(12)
        )
        + " y = MatMul(h12, w) }",
        lambda r: {"w": normal(r, 16, 16, scale=0.08), "eps": f32(1e-5)},
        rows_of(16),
        most_kept=10,
        limit_u=8.0,
        levels=("O1",),
    ),
    Trap(
        "weights stored in half",
        "g (float[n,8] x) => (float[n,8] y) { wf = Cast<to=1>(wh) h = MatMul(x, wf) r = Relu(h) y = MatMul(r, wf) }",
        lambda r: {"wh": normal(r, 8, 8, scale=0.35).astype(np.float16)},
        rows_of(8),
    ),
    Trap(
        "a file that is mixed already",
        "g (float[n,8] x) => (float[n,8] y) { xh = Cast<to=10>(x) h = MatMul(xh, wh) f = Cast<to=1>(h) q = Mul(f, f)"
        " e = Exp(h) ef = Cast<to=1>(e) s = Sqrt(q) z = Add(s, ef) zh = Cast<to=10>(z) o = MatMul(zh, wh) y = Cast<to=1>(o) }",
        lambda r: {"wh": normal(r, 8, 8, scale=0.2).astype(np.float16)},
        rows_of(8),
    ),
    Trap(
        "a file that is half throughout",
        "g (float16[n,8] x) => (float16[n,8] y) { h = MatMul(x, wh) a = Add(h, bh) r = Relu(a) y = MatMul(r, wh) }",
        lambda r: {"wh": normal(r, 8, 8, scale=0.35).astype(np.float16), "bh": normal(r, 8).astype(np.float16)},
        lambda r, n: {"x": normal(r, n, 8).astype(np.float16)},
    ),
]  # fmt: skip


def _masks(random: Random, rows: int, length: int, least: int = 0) -> np.ndarray:
    """Prefixes of ones; the second row has none where ``least`` is 0."""
    lengths = random.integers(least, length + 1, rows)
    lengths[1:2] = least
    return (np.arange(length) < lengths[:, None]).astype(np.int64)


def _with_tiny_rows(array: np.ndarray, tiny: float = 1e-4) -> np.ndarray:
    array[::3] *= np.float32(tiny)
    array[1::5] = 0
    return array


def _signed(random: Random, rows: int, width: int) -> np.ndarray:
    """Rows that are one vector or its opposite: an odd number of them never adds up to nothing."""
    return f32(random.choice([-1, 1], (rows, 1)) * np.linspace(0.5, 1.5, width))


def _apart(inputs: int, outputs: int) -> np.ndarray:
    """Columns of so different lengths that the order of their scores is clear in half."""
    return f32(np.linspace(0.3, 0.9, inputs)[:, None] * 1.3 ** np.arange(outputs))


def _boxes(random: Random, rows: int) -> np.ndarray:
    corner = random.uniform(0, 900, (rows, 1, 20, 2))
    return f32(np.concatenate([corner, corner + random.uniform(20, 100, corner.shape)], -1))


def _spread(random: Random, rows: int) -> np.ndarray:
    """Features whose scores are spread too far to change places in half."""
    order = np.stack([random.permutation(20) for _ in range(rows)])[:, None, :, None]
    return f32(order * 0.02 + np.zeros(8))


FOREIGN = {trap.name: trap for trap in _TRAPS}
EVERY_RUN = {  # one of a kind, of those that convert soonest: the others are slow
    "mlp", "a sum beyond half", "islands by Cast", "epsilons under a root, zero and tiny rows", "an If in a Loop",
    "an LSTM", "one value read by two FP32 nodes", "weights stored in half", "encoder",
}  # fmt: skip
