from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from draftwire.models import is_pulled, model_path
from draftwire.pieces import byte_alphabet, piece_rules
from draftwire.testing_models import TINY_SPECIAL, save_tiny_model
from draftwire.tokenizer import ChatTemplateError, Tokenizer, TokenizerError, vocabulary_fingerprint


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", 1)


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_dir)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    if not is_pulled("smollm2-135m"):
        pytest.skip("the default model is not here: run `draftwire models pull smollm2-135m`")
    return Tokenizer(model_path("smollm2-135m"))


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.piece_bytes(i) for i in ids).decode("utf-8", errors="replace")


def save(folder: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def byte_level(added: list[AddedToken]) -> Backend:
    vocab = {char: i for i, char in enumerate(byte_alphabet())}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added)
    return backend


def sentencepiece(decoder: Any) -> Backend:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "\u2581a", "b", "\u00e9\u2581"]
    backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    backend.decoder = decoder
    return backend


LLAMA = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


@given(ids=st.lists(st.integers(0, 258), max_size=40))
def test_pieces_join_to_the_decoded_text(tiny: Tokenizer, ids: list[int]) -> None:
    assert joined(tiny, ids) == tiny.decode(ids, skip_special_tokens=False)


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_pieces_of_smollm2_join_to_the_decoded_text(smollm: Tokenizer, ids: list[int]) -> None:
    assert joined(smollm, ids) == smollm.decode(ids, skip_special_tokens=False)


@pytest.mark.model
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_smollm2_gives_back_every_text(smollm: Tokenizer, text: str) -> None:
    # Its vocabulary lacks 21 of the 256 bytes, all of them rare; such text cannot come back.
    singles = {piece for i in range(smollm.size) if len(piece := smollm.piece_bytes(i)) == 1}
    assume(all(bytes([byte]) in singles for byte in text.encode()))
    assert joined(smollm, smollm.encode(text, add_special_tokens=False)) == text


@pytest.mark.model
def test_smollm2_has_the_facts_of_its_release(smollm: Tokenizer) -> None:
    assert smollm.size == 49152
    assert smollm.special_ids == set(range(17))
    assert smollm.end_ids(model_path("smollm2-135m")) == {2}
    assert smollm.piece_bytes(smollm.encode(" Paris", False)[0]) == b" Paris"
    digits = smollm.encode("1984", False)
    assert [smollm.piece_bytes(i) for i in digits] == [b"1", b"9", b"8", b"4"]
    prompt = smollm.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert smollm.decode(prompt, False).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(ids=st.lists(st.integers(256, 259), max_size=8))
def test_added_tokens_contribute_what_decode_shows(tmp_path: Path, ids: list[int]) -> None:
    added = [AddedToken(t) for t in ("<think>", "<a b>", "\uff5cend\uff5c", "</think>")]
    tokenizer = Tokenizer(save(tmp_path, byte_level(added)))
    assert joined(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "ids",
    [
        [259],
        [260, 261, 262, 260],
        [3 + 0xE2, 3 + 0x82, 3 + 0xAC, 261],
        [261, 1, 259, 262],
        [259, 259, 260],
    ],
)
def test_sentencepiece_pieces_join_to_the_decoded_text(tmp_path: Path, ids: list[int]) -> None:
    tokenizer = Tokenizer(save(tmp_path, sentencepiece(decoders.Sequence(LLAMA))))
    assert tokenizer.strips_leading_space
    assert joined(tokenizer, ids).removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)
    kept = Tokenizer(save(tmp_path, sentencepiece(decoders.Sequence(LLAMA[:3]))))
    assert not kept.strips_leading_space
    assert joined(kept, ids) == kept.decode(ids, skip_special_tokens=False)


def test_pieces_of_a_byte_fallback_are_single_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, sentencepiece(decoders.Sequence(LLAMA))))
    assert [tokenizer.piece_bytes(3 + b) for b in (0x00, 0x41, 0xFF)] == [b"\x00", b"A", b"\xff"]
    assert tokenizer.piece_bytes(260) == b" a"


def test_metaspace_is_a_space(tmp_path: Path) -> None:
    vocab = [("<unk>", 0.0), ("\u2581hello", -1.0), ("\u2581", -2.0), ("x", -3.0)]
    backend = Backend(models.Unigram(vocab, 0))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(save(tmp_path, backend))
    for ids in ([1, 1], [3, 1, 3], [2, 3]):
        text = joined(tokenizer, ids)
        assert tokenizer.strips_leading_space
        assert text.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "CTC"}]}])
def test_a_decoder_that_cannot_be_streamed_has_no_rules(decoder: dict[str, Any] | None) -> None:
    assert piece_rules(decoder) is None


def test_a_tokenizer_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="'WordPiece' decoder"):
        Tokenizer(save(tmp_path, backend))


def test_ids_without_a_token_add_nothing(tiny: Tokenizer) -> None:
    assert tiny.size == 259
    assert tiny.piece_bytes(259) == b""
    assert tiny.decode([300, 65], skip_special_tokens=False) == "A"


def test_special_ids_are_what_decode_skips(tiny: Tokenizer) -> None:
    ids = [65, *sorted(tiny.special_ids), 66]
    assert len(tiny.special_ids) == len(TINY_SPECIAL)
    assert tiny.decode(ids, skip_special_tokens=True) == "AB"
    assert tiny.decode(ids, skip_special_tokens=False) == "A" + "".join(TINY_SPECIAL) + "B"


def test_fingerprint_is_the_documented_hash() -> None:
    raw = b"draftwire-vocabulary-1\n" + struct.pack("<I", 3)
    raw += struct.pack("<I", 1) + b"a" + struct.pack("<I", 0xFFFFFFFF) + struct.pack("<I", 2) + "é".encode()
    assert vocabulary_fingerprint({0: "a", 2: "é", 7: "beyond"}, 3) == hashlib.sha256(raw).hexdigest()


def test_fingerprint_ignores_roles_and_sees_pieces(tmp_path: Path) -> None:
    def fingerprint(name: str, added: list[AddedToken], **config: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        return Tokenizer(save(folder, byte_level(added), **config)).fingerprint

    plain = fingerprint("plain", [AddedToken("<x>")])
    assert fingerprint("special", [AddedToken("<x>", special=True)], eos_token="<x>") == plain
    assert fingerprint("other", [AddedToken("<y>")]) != plain
    assert fingerprint("more", [AddedToken("<x>"), AddedToken("<y>")]) != plain


def test_end_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level([AddedToken("<x>"), AddedToken("<y>"), AddedToken("<z>")]), eos_token="<x>")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": {"eos_token_id": 5}}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.end_ids(folder) == {5, 256}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 4, "text_config": {"eos_token_id": [5]}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<y>"}}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<z>"}))
    assert tokenizer.end_ids(folder) == {4, 5, 1, 2, 257, 258}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "absent"}))
    assert tokenizer.end_ids(folder) == {4, 5, 258}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json"):
        tokenizer.end_ids(folder)


def test_chat_is_written_by_the_template(tiny: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    ids = tiny.apply_chat_template(chat, add_generation_prompt=True)
    assert tiny.decode(ids, False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 257
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = tiny.apply_chat_template(chat, add_generation_prompt=False, tools=tools)
    assert tiny.decode(with_tools, False).startswith('<|im_start|>tools\n[{"type": "function"')


def test_a_final_message_can_be_continued(tiny: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    ids = tiny.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert tiny.decode(ids, False).endswith("<|im_start|>assistant\nwell")


@pytest.mark.parametrize(
    ("messages", "arguments", "fault"),
    [
        ([{"role": "user"}], {}, "refuses these messages"),
        ([{"role": "user", "content": "hi"}], {"template_arguments": {"tokenize": False}}, "tokenize"),
        ([{"role": "user", "content": "hi"}], {"continue_final_message": True}, "refuses these messages"),
    ],
)
def test_a_chat_that_cannot_be_written_is_an_error(
    tiny: Tokenizer, messages: list[dict[str, Any]], arguments: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ChatTemplateError, match=fault):
        tiny.apply_chat_template(messages, add_generation_prompt=True, **arguments)


def test_template_variables_are_found(tiny: Tokenizer, tmp_path: Path) -> None:
    assert tiny.template_uses("tools")
    assert not tiny.template_uses("enable_thinking")
    template = (
        "You may use tools. {% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    folder = save(tmp_path, byte_level([]), chat_template=template)
    special = Tokenizer(folder)
    # Parsing fails on the tag of transformers: the word is looked for instead.
    assert special.template_uses("messages")
    assert not special.template_uses("documents")


def test_no_template_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level([])))
    assert not tokenizer.has_chat_template
    assert not tokenizer.template_uses("tools")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)


@pytest.mark.parametrize("content", [None, "{", '{"model": 1}'])
def test_a_damaged_tokenizer_names_its_directory(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=tmp_path.name):
        Tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="is not a directory"):
        Tokenizer(tmp_path / "absent")
