"""One digest of client data, computed the same way from what TFF read and from what jaxpriv reads."""

import hashlib
import json


def digest(examples: list[dict]) -> str:
    """SHA-256 over the examples in this order, each as canonical JSON."""
    lines = (json.dumps(example, sort_keys=True, ensure_ascii=True) for example in examples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
