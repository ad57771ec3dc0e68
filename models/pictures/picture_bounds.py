"""The largest picture that is decoded. Imports nothing: the table of limits is read before numpy is loaded."""

MAX_PIXELS = 2**25  # 33 million: 100 MB while it is decoded
MAX_SIDE = 2**14  # pixels: a picture of few columns and millions of rows takes seconds, whatever its area
