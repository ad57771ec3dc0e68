"""The functions of other FP16 converters with a proof: `from halfeven.drop_in import …` (docs/export.md)."""

from halfeven.serve.python_api.drop_in import (
    auto_convert_mixed_precision,
    auto_convert_mixed_precision_model_path,
    convert_float_to_float16,
    convert_float_to_float16_model_path,
    convert_to_f16,
    convert_to_mixed_precision,
)

__all__ = [
    "auto_convert_mixed_precision",
    "auto_convert_mixed_precision_model_path",
    "convert_float_to_float16",
    "convert_float_to_float16_model_path",
    "convert_to_f16",
    "convert_to_mixed_precision",
]
