"""Naive caches, written with lists and dicts alone from the description of vLLM and LMCache, to test against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class NaivePool:
    """vLLM's GPU cache for one request at a time."""

    def __init__(self, blocks: int, size: int):
        self.size = size
        self.free: list[list[object]] = [[None] for _ in range(blocks - 1)]
        self.cached: dict[object, list[list[object]]] = {}

    def serve(self, tokens: Sequence[object], prompt: int) -> int:
        """Serves a prompt and the output after it, whose last token is never computed; returns tokens hit."""
        keys = [tuple(tokens[: end + self.size]) for end in range(0, len(tokens) - self.size + 1, self.size)]
        table = []
        for key in keys[: (prompt - 1) // self.size]:
            if not self.cached.get(key):
                break
            table.append(self.cached[key][0])
        hit = len(table)
        self.free = [block for block in self.free if not any(block is held for held in table)]
        held = len(tokens) - 1
        while len(table) * self.size < held:
            block = self.free.pop(0)
            if block[0] is not None:
                same = self.cached[block[0]]
                same[:] = [other for other in same if other is not block]
            block[0] = None
            table.append(block)
        for index in range(hit, held // self.size):
            table[index][0] = keys[index]
            self.cached.setdefault(keys[index], []).append(table[index])
        self.free = [block for block in reversed(table) if block[0] is None] + self.free
        self.free.extend(block for block in reversed(table) if block[0] is not None)
        return hit * self.size

    def resident(self, tokens: Sequence[object], prompt: int) -> int:
        """Prompt tokens that would hit."""
        end = 0
        while end + self.size <= prompt - 1 and self.cached.get(tuple(tokens[: end + self.size])):
            end += self.size
        return end


@dataclass
class NaiveTier:
    """A tier of chunks; `keys` stand in order of eviction."""

    capacity: int
    keys: list[object] = field(default_factory=list)

    def add(self, key: object, protected: set[object]) -> None:
        if key in self.keys:
            return
        if len(self.keys) >= self.capacity:
            victims = [key for key in self.keys if key not in protected]
            if not victims:
                return
            self.keys.remove(victims[0])
        self.keys.append(key)

    def touch(self, keys: Sequence[object]) -> None:
        for key in reversed(keys):
            if key in self.keys:
                self.keys.remove(key)
                self.keys.append(key)


class NaiveTiers:
    """Lower tiers for one request at a time, with links that take no time."""

    def __init__(self, capacities: dict[str, int], size: int, connector: str):
        self.size = size
        self.lmcache = connector == "lmcache"
        self.tiers = {name: NaiveTier(tokens // size) for name, tokens in capacities.items()}

    def serve(self, tokens: Sequence[object], prompt: int, gpu: int) -> dict[str, int]:
        """Looks up, loads and stores for one request; returns prompt tokens served by each tier."""
        keys = [tuple(tokens[: end + self.size]) for end in range(0, len(tokens) - self.size + 1, self.size)]
        full = keys[: prompt // self.size]
        place = begin = gpu // self.size
        if self.lmcache:
            place = 0
        owner: dict[int, str] = {}
        for name, tier in self.tiers.items():
            found = place
            while found < len(full) and full[found] in tier.keys:
                owner[found] = name
                found += 1
            tier.touch(full[place:found] if self.lmcache else full)
            place = found
        served = dict.fromkeys(self.tiers, 0)
        end = min(place * self.size, prompt - 1)
        for token in range(gpu, end):
            served[owner[token // self.size]] += 1
        loaded = [index for index in range(begin, place) if end > gpu]
        top = next(iter(self.tiers))
        for index in loaded:
            if owner[index] != top and top == "cpu":
                others = {full[other] for other in loaded}
                self.tiers[top].add(full[index], others)
        start = place if self.lmcache or loaded else 0
        for stop, chunks in ((len(full), full), ((len(tokens) - 1) // self.size, keys)):
            if chunks is keys and self.lmcache:
                continue
            room = self._room(top, chunks[start:stop])
            for tier in self.tiers.values():
                added: set[object] = set()
                for key in chunks[start:stop][:room]:
                    if key not in tier.keys:
                        tier.add(key, added)
                        added.add(key)
                if not self.lmcache and stop > start:
                    tier.touch(chunks[:stop])
            start = max(start, stop)
        return served

    def _room(self, top: str, keys: Sequence[object]) -> int:
        """How many of `keys` can be stored: LMCache drops what does not fit its staging buffer at once."""
        if not self.lmcache or len(self.tiers) == 1:
            return len(keys)
        missing = sum(key not in self.tiers[top].keys for key in keys)
        return len(keys) - max(0, missing - self.tiers[top].capacity)


@dataclass(eq=False)
class Node:
    """A node of SGLang's radix tree: pages, where they are, and when they were used last."""

    pages: list[object]
    parent: Node | None
    used: int = 0
    gpu: bool = True
    cpu: bool = False
    children: list[Node] = field(default_factory=list)


class NaiveRadix:
    """SGLang's radix tree for one request at a time, with as many pages as fit and, below, written-through memory."""

    def __init__(self, pages: int, size: int, chunk: int, below: int = 0):
        self.pages, self.size, self.chunk, self.below = pages, size, chunk, below
        self.root = Node([], None)
        self.now = 0

    def serve(self, tokens: Sequence[object], prompt: int) -> tuple[int, int]:
        """Serves a prompt and the output after it; returns tokens hit on the GPU and in CPU memory."""
        self.now += 1
        size = self.size
        pages = [tuple(tokens[begin : begin + size]) for begin in range(0, len(tokens) - size + 1, size)]
        path = self._match(pages[: (prompt - 1) // size])
        on_gpu = sum(len(node.pages) for node in path if node.gpu)
        on_cpu = sum(len(node.pages) for node in path) - on_gpu
        if on_cpu * size < 10:
            path = [node for node in path if node.gpu]
            on_cpu = 0
        for node in path:
            node.used = self.now
        self._make_room(-(-prompt // size) - on_gpu, path)
        for node in path:
            node.gpu = True
        known, full = (on_gpu + on_cpu) * size, (len(tokens) - 1) // size
        for end in [*range(known, prompt, self.chunk), prompt][1:]:
            path = self._insert(pages[: end // size], path)
        self._make_room(-(-(len(tokens) - 1) // size) - prompt // size, path)
        self._insert(pages[:full], path)
        return on_gpu * size, on_cpu * size

    def _match(self, pages: list[object]) -> list[Node]:
        path, node = [], self.root
        while pages:
            child = next((child for child in node.children if child.pages[0] == pages[0]), None)
            if child is None:
                break
            same = next((n for n, (a, b) in enumerate(zip(child.pages, pages, strict=False)) if a != b), None)
            same = min(len(child.pages), len(pages)) if same is None else same
            if same < len(child.pages):
                child = self._split(child, same)
            path.append(child)
            node, pages = child, pages[same:]
        return path

    def _split(self, node: Node, count: int) -> Node:
        head = Node(node.pages[:count], node.parent, node.used, node.gpu, node.cpu, [node])
        node.parent.children[node.parent.children.index(node)] = head
        node.pages, node.parent = node.pages[count:], head
        return head

    def _insert(self, pages: list[object], path: list[Node]) -> list[Node]:
        held = sum(len(node.pages) for node in path)
        while held < len(pages):  # what the tree lost from the GPU and keeps in CPU memory is there again
            parent = path[-1] if path else self.root
            child = next((child for child in parent.children if child.pages[0] == pages[held]), None)
            if child is None:
                child = Node(pages[held:], parent)
                parent.children.append(child)
            else:
                found = self._match(pages)
                child = found[len(path)]
            child.gpu = True
            path = [*path, child]
            held += len(child.pages)
        for node in path:
            node.used = self.now
            self._back_up(node)
        return path

    def _back_up(self, node: Node) -> None:
        if node.cpu or not self.below:
            return
        while sum(len(other.pages) for other in self._all() if other.cpu) + len(node.pages) > self.below:
            leaves = [other for other in self._all() if other.cpu and not other.gpu and not other.children]
            self._remove(min(leaves, key=lambda other: other.used))
        node.cpu = True

    def _make_room(self, pages: int, path: list[Node]) -> None:
        while sum(len(node.pages) for node in self._all() if node.gpu) + pages > self.pages:
            leaves = [
                node
                for node in self._all()
                if node.gpu and node not in path and not any(child.gpu for child in node.children)
            ]
            leaf = min(leaves, key=lambda node: node.used)
            leaf.gpu = False
            if not leaf.cpu:
                self._remove(leaf)

    def _remove(self, node: Node) -> None:
        node.parent.children.remove(node)

    def _all(self) -> list[Node]:
        found, stack = [], list(self.root.children)
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children)
        return found
