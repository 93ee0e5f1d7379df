"""Masked sums: the server learns the sum of the clients' vectors modulo 2^bits, and nothing of any one
vector.

Bonawitz et al. 2017 (CCS, doi:10.1145/3133956.3133982) over the sparse neighbour graph of Bell et al. 2020
(CCS, doi:10.1145/3372297.3417885). Four messages of every client:

1. advertise: two X25519 public keys, one for masks, one for the channel to each neighbour;
2. share: Shamir shares of its mask key and of its self-mask seed, sealed for each neighbour
(ChaCha20-Poly1305); 3. mask: its vector, plus its self mask, plus or minus a mask agreed with each
neighbour, modulo 2^bits; 4. reveal: of each neighbour, the share of the seed if it delivered, of the mask
key if it dropped out.

The server takes the self masks of those who delivered and the pairwise masks of those who did not off the
sum. A client never gives both shares of one neighbour, and none at all for a sum of fewer than
`min_survivors`. Masks are ChaCha20 keystreams under 32-byte keys derived by HKDF-SHA256; no secret is folded
to fewer bits.

Holds against an honest-but-curious server with fewer than `threshold` colluding neighbours of a client. A
server that
invents clients or swaps public keys is outside: that takes signed keys.
"""

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from trainers.common.errors import InputError

PRIME = 2**256 + 297  # the least prime above any 32-byte secret
SHARE_BYTES = 33


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What all parties of one sum agree on.

    session: names this sum (run, round, attempt); derived keys of different sums have nothing in common.
    length: entries of a vector. bits: modulus 2^bits, at most 32.
    neighbours: of each client, in a graph drawn at random; an even number, or everybody where clients are
      few.
    threshold: shares that rebuild a secret: more than half of the neighbours.
    min_survivors: fewest delivered vectors of which a sum is revealed.
    """

    session: bytes
    length: int
    bits: int
    neighbours: int
    threshold: int
    min_survivors: int

    def __post_init__(self):
        if not 1 <= self.bits <= 32:
            raise InputError(f"secure aggregation: bits must be from 1 to 32, got {self.bits}")
        if self.length < 1:
            raise InputError(f"secure aggregation: length must be at least 1, got {self.length}")
        if self.neighbours < 2 or self.neighbours % 2:
            raise InputError(
                f"secure aggregation: neighbours must be even and at least 2, got {self.neighbours}"
            )
        if not self.neighbours / 2 < self.threshold <= self.neighbours:
            raise InputError(
                "secure aggregation: threshold must be more than half of the neighbours and at most all "
                f"{self.neighbours}, got {self.threshold}: two halves could otherwise rebuild both secrets of a client"
            )
        if self.min_survivors < 2:
            raise InputError(
                f"secure aggregation: min_survivors must be at least 2 (a sum of one is that one), got "
                f"{self.min_survivors}"
            )


@dataclasses.dataclass(frozen=True)
class PublicKeys:
    """A client's first message: 2 x 32 bytes."""

    mask: bytes
    channel: bytes


@dataclasses.dataclass(frozen=True)
class Reveal:
    """A client's last message: shares of its neighbours' secrets, by neighbour; no client is in both."""

    seeds: dict[int, tuple[int, int]]
    mask_keys: dict[int, tuple[int, int]]


def neighbour_graph(
    clients: Sequence[int], neighbours: int, shuffle: Callable[[list], None]
) -> dict[int, list[int]]:
    """Each client's neighbours: a ring in random order, everybody tied to the nearest `neighbours`.

    Args:
      shuffle: puts a list in random order in place; the server's own randomness, after the clients are known.
    """
    ring = list(clients)
    if len(set(ring)) != len(ring):
        raise InputError("secure aggregation: a client id comes twice")
    shuffle(ring)
    n = len(ring)
    if neighbours >= n - 1:
        return {client: [other for other in ring if other != client] for client in ring}
    steps = range(1, neighbours // 2 + 1)
    return {
        client: [ring[(i + sign * step) % n] for step in steps for sign in (-1, 1)]
        for i, client in enumerate(ring)
    }


class Client:
    """One client through one sum. Each method is one message; called out of order or twice it refuses."""

    def __init__(self, client_id: int, setting: Setting):
        self.id, self.setting = client_id, setting
        self._mask_key, self._channel_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(32)
        self._keys: Mapping[int, PublicKeys] = {}
        self._threshold = 0
        self._stage = 0

    def _enter(self, stage: int) -> None:
        if self._stage != stage:
            raise InputError(
                f"secure aggregation: client {self.id} was asked for message {stage + 1} out of turn"
            )
        self._stage = stage + 1

    def advertise(self) -> PublicKeys:
        """Message 1."""
        self._enter(0)
        return PublicKeys(
            self._mask_key.public_key().public_bytes_raw(), self._channel_key.public_key().public_bytes_raw()
        )

    def share(self, keys: Mapping[int, PublicKeys]) -> dict[int, bytes]:
        """Message 2, from the neighbours' keys: sealed shares by neighbour.

        Raises:
          InputError: so few neighbours that the threshold cannot be met.
        """
        self._enter(1)
        self._keys = dict(keys)
        self._threshold = min(self.setting.threshold, len(keys))
        if self._threshold <= len(keys) / 2 or len(keys) < 2:
            raise InputError(
                f"secure aggregation: client {self.id} has {len(keys)} neighbours, too few for a threshold of "
                f"{self.setting.threshold}"
            )
        others = sorted(keys)
        mask_shares = split_secret(self._mask_key.private_bytes_raw(), len(others), self._threshold)
        seed_shares = split_secret(self._seed, len(others), self._threshold)
        sealed = {}
        for place, other in enumerate(others):
            x, y_mask = mask_shares[place]
            _, y_seed = seed_shares[place]
            plain = (
                x.to_bytes(4, "big")
                + y_mask.to_bytes(SHARE_BYTES, "big")
                + y_seed.to_bytes(SHARE_BYTES, "big")
            )
            nonce = os.urandom(12)
            cipher = ChaCha20Poly1305(self._channel(other))
            sealed[other] = nonce + cipher.encrypt(nonce, plain, self._address(self.id, other))
        return sealed

    def mask(self, vector: np.ndarray, sealed: Mapping[int, bytes]) -> np.ndarray:
        """Message 3: the masked vector. `sealed` holds the neighbours' messages 2 for this client.

        Masks are laid only with neighbours whose shares have come: those who left before cancel with nobody.

        Raises:
          InputError: a vector of the wrong shape or range, or a share that was tampered with.
        """
        self._enter(2)
        modulus = self.setting.bits
        vector = np.asarray(vector)
        if vector.shape != (self.setting.length,) or vector.dtype != np.uint32:
            raise InputError(
                f"secure aggregation: client {self.id}'s vector must be {self.setting.length} uint32 entries, got "
                f"{vector.dtype} of shape {vector.shape}"
            )
        if modulus < 32 and (vector >> np.uint32(modulus)).any():
            raise InputError(
                f"secure aggregation: client {self.id}'s vector has entries beyond {modulus} bits"
            )
        self._shares = {other: self._open(other, message) for other, message in sealed.items()}
        total = vector + mask_stream(self._seed, self.setting)
        for other in self._shares:
            key = _pair_key(self._mask_key, self._keys[other].mask, self.setting, self.id, other)
            total = total + _signed(self.id, other, mask_stream(key, self.setting))
        return total & np.uint32(2**modulus - 1)

    def reveal(self, delivered: Iterable[int]) -> Reveal:
        """Message 4, once: for each neighbour that sent shares, that of its seed or of its mask key, never
        both.

        Raises:
          InputError: fewer than `min_survivors` delivered, or this client's own vector is said to be missing.
        """
        delivered = set(delivered)
        if len(delivered) < self.setting.min_survivors:
            raise InputError(
                f"secure aggregation: {len(delivered)} vectors were delivered, fewer than the "
                f"{self.setting.min_survivors} needed; the round is abandoned, nothing is revealed"
            )
        self._enter(3)
        if self.id not in delivered:
            raise InputError(
                f"secure aggregation: client {self.id} delivered, but the server says it did not"
            )
        seeds = {o: (x, seed) for o, (x, _, seed) in self._shares.items() if o in delivered}
        mask_keys = {o: (x, key) for o, (x, key, _) in self._shares.items() if o not in delivered}
        return Reveal(seeds, mask_keys)

    def _channel(self, other: int) -> bytes:
        shared = self._channel_key.exchange(X25519PublicKey.from_public_bytes(self._keys[other].channel))
        return derive(shared, b"channel", self.setting.session, self.id, other)

    def _address(self, sender: int, receiver: int) -> bytes:
        return self.setting.session + sender.to_bytes(8, "big") + receiver.to_bytes(8, "big")

    def _open(self, other: int, message: bytes) -> tuple[int, int, int]:
        if other not in self._keys:
            raise InputError(
                f"secure aggregation: client {self.id} got a share of {other}, who is no neighbour"
            )
        try:
            plain = ChaCha20Poly1305(self._channel(other)).decrypt(
                message[:12], message[12:], self._address(other, self.id)
            )
        except InvalidTag:
            raise InputError(
                f"secure aggregation: the share that client {self.id} got of client {other} was tampered with"
            ) from None
        y_mask, y_seed = plain[4 : 4 + SHARE_BYTES], plain[4 + SHARE_BYTES :]
        return int.from_bytes(plain[:4], "big"), int.from_bytes(y_mask, "big"), int.from_bytes(y_seed, "big")


def unmask(
    masked_total: np.ndarray,
    setting: Setting,
    graph: Mapping[int, Sequence[int]],
    keys: Mapping[int, PublicKeys],
    sharers: Iterable[int],
    delivered: Iterable[int],
    reveals: Mapping[int, Reveal],
) -> np.ndarray:
    """The sum of the delivered vectors modulo 2^bits: exact.

    Args:
      masked_total: sum of the delivered messages 3 modulo 2^32; the server need not keep the single ones.
      graph, keys: of all clients that advertised. sharers: those whose message 2 came. delivered: whose
      message 3 came.
      reveals: messages 4 by client; some may be missing.

    Raises:
      InputError: fewer than `min_survivors` vectors, or too few shares left of some secret.
    """
    delivered = set(delivered)
    if len(delivered) < setting.min_survivors:
        raise InputError(
            f"secure aggregation: {len(delivered)} vectors were delivered, fewer than the "
            f"{setting.min_survivors} needed; the round is abandoned"
        )
    total = masked_total.astype(np.uint32)
    for client in delivered:
        shares = [r.seeds[client] for r in reveals.values() if client in r.seeds]
        total -= mask_stream(_rebuild(setting, graph, client, shares, "self mask"), setting)
    for client in set(sharers) - delivered:
        shares = [r.mask_keys[client] for r in reveals.values() if client in r.mask_keys]
        private = X25519PrivateKey.from_private_bytes(_rebuild(setting, graph, client, shares, "mask key"))
        for other in delivered.intersection(graph[client]):
            # What `other` laid with the client that left is taken off again.
            key = _pair_key(private, keys[other].mask, setting, client, other)
            total -= _signed(other, client, mask_stream(key, setting))
    return total & np.uint32(2**setting.bits - 1)


def _rebuild(setting, graph, client, shares, what):
    threshold = min(setting.threshold, len(graph[client]))
    if len(shares) < threshold:
        raise InputError(
            f"secure aggregation: {len(shares)} shares of client {client}'s {what} are left, fewer than the "
            f"threshold of {threshold}; the round is abandoned"
        )
    return join_secret(shares[:threshold])


def split_secret(secret: bytes, num_shares: int, threshold: int) -> list[tuple[int, int]]:
    """Shamir shares `(x, y)` of a 32-byte secret: any `threshold` rebuild it, fewer say nothing."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, num_shares + 1):
        y = 0
        for coefficient in reversed(coefficients):
            y = (y * x + coefficient) % PRIME
        shares.append((x, y))
    return shares


def join_secret(shares: Sequence[tuple[int, int]]) -> bytes:
    """The secret of as many shares as the threshold was.

    Raises:
      InputError: shares that do not belong together.
    """
    total = 0
    for i, (x, y) in enumerate(shares):
        above = below = 1
        for j, (other, _) in enumerate(shares):
            if i != j:
                above, below = above * -other % PRIME, below * (x - other) % PRIME
        total = (total + y * above * pow(below, -1, PRIME)) % PRIME
    if total >= 2**256:
        raise InputError("secure aggregation: secret shares do not belong together; the round is abandoned")
    return total.to_bytes(32, "big")


def derive(shared: bytes, purpose: bytes, session: bytes, a: int, b: int) -> bytes:
    """A 32-byte key for one purpose, session and (unordered) pair of clients, by HKDF-SHA256."""
    low, high = sorted((a, b))
    info = b"|".join((b"jaxpriv secure sum", purpose, low.to_bytes(8, "big"), high.to_bytes(8, "big")))
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=session, info=info).derive(shared)


def mask_stream(key: bytes, setting: Setting) -> np.ndarray:
    """`length` uniform uint32 entries below 2^bits: the ChaCha20 keystream of a 32-byte key."""
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    stream = np.frombuffer(encryptor.update(bytes(4 * setting.length)), "<u4")
    return stream & np.uint32(2**setting.bits - 1)


def _pair_key(private, public, setting, a, b):
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    return derive(shared, b"mask", setting.session, a, b)


def _signed(client, other, mask):
    """Plus for the smaller id, minus for the larger (modulo 2^32), so that a pair's masks cancel."""
    return mask if client < other else np.uint32(0) - mask


@dataclasses.dataclass(frozen=True)
class SecureSum:
    """total: the sum modulo 2^bits. survivors: whose vectors are in it. bytes_up, bytes_down: over all clients."""

    total: np.ndarray
    survivors: list[int]
    bytes_up: int
    bytes_down: int


def secure_sum(
    vectors: Mapping[int, np.ndarray],
    setting: Setting,
    *,
    drop_after_share: Iterable[int] = (),
    drop_after_mask: Iterable[int] = (),
) -> SecureSum:
    """Runs all parties in one process, the drop-outs included: the protocol as a server would drive it.

    Args:
      vectors: uint32 by client id (`jaxpriv.secagg.encode`).
      drop_after_share: clients whose masked vector never comes. drop_after_mask: whose last message never
        comes.

    Raises:
      InputError: too few clients, survivors or shares; nothing is revealed then.
    """
    gone, silent = set(drop_after_share), set(drop_after_mask)
    graph = neighbour_graph(sorted(vectors), setting.neighbours, secrets.SystemRandom().shuffle)
    clients = {i: Client(i, setting) for i in graph}
    keys = {i: client.advertise() for i, client in clients.items()}
    up, down = 64 * len(clients), 64 * sum(map(len, graph.values()))
    boxes: dict[int, dict[int, bytes]] = {i: {} for i in graph}
    for i, client in clients.items():
        for other, message in client.share({o: keys[o] for o in graph[i]}).items():
            boxes[other][i] = message
            up, down = up + len(message), down + len(message)
    delivered = [i for i in clients if i not in gone]
    total = np.zeros(setting.length, np.uint32)
    for i in delivered:
        total += clients[i].mask(vectors[i], boxes[i])
    up += -(-setting.length * setting.bits // 8) * len(delivered)
    down += 8 * len(delivered) ** 2  # the list of those who delivered, to each of them
    reveals = {i: clients[i].reveal(delivered) for i in delivered if i not in silent}
    up += sum((4 + SHARE_BYTES) * (len(r.seeds) + len(r.mask_keys)) for r in reveals.values())
    total = unmask(total, setting, graph, keys, clients, delivered, reveals)
    return SecureSum(total, sorted(delivered), up, down)
