"""The words by which Python and libraries say that memory was lacking. Needs the standard library alone."""

# Words of a message that memory was lacking, in lower case: of the kernel and the loader, libstdc++, NumPy, torch's
# allocators, ONNX Runtime's arenas.
NO_MEMORY = (
    "failed to allocate memory",
    "bad_alloc",
    "bad allocation",
    "bad_array_new_length",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
    "failed to map segment",
    "not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if this error of Python, torch or another library, or one of its causes, says that memory was lacking."""
    return any(isinstance(one, MemoryError) or mentions_lacking_memory(str(one)) for one in causes(error))


def mentions_lacking_memory(words: str) -> bool:
    """True if a message, or what a process wrote last, says that memory was lacking."""
    text = words.lower().replace("cannot allocate memory in static tls block", "")
    return any(one in text for one in NO_MEMORY)


def exit_words(status: int | None) -> str:
    """The exit status of a process, in words; what a SIGKILL from outside most often means."""
    killed = (
        ": the system kills a process so where the memory of the machine or of its control group runs out"
    )
    return f"exit status {status}{killed if status == -9 else ''}"


def causes(error: BaseException) -> list[BaseException]:
    """The error and its causes: an engine may have raised its own error from the device's."""
    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__
    return found
