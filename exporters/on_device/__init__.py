"""The proof of a version again on the device that serves it, and what is recorded of that device."""
