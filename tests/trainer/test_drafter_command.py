"""`tlt drafter init` and `tlt drafter train` on the shipped target, and their errors."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.samples import LAYERS, demo_target, solutions
from tests.unit.recorded_samples import sample
from tlt_server.__main__ import main
from tlt_server.demo.workload import TARGET
from tlt_server.drafter import data, device
from tlt_server.drafter import train as train_command
from tlt_server.drafter.data import TargetLimits, read_documents
from tlt_server.drafter.device import device_of, memory_refused
from tlt_server.engine.devices.choice import Gpu
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.models.eagle import Eagle1, Eagle3
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.samples.identity import identity_of
from tlt_server.samples.segments import SegmentHeader, header_bytes, recorded
from tlt_server.trainer.exporting.initial import draft_vocabulary

LIMITS = TargetLimits(512, 4096)
PAIR = ["--target", str(TARGET)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "solutions.jsonl"
    with path.open("w") as file:
        for token_T, counted_T in solutions(0, 24, 60):
            prompt, response = token_T[~counted_T].tolist(), token_T[counted_T].tolist()
            file.write(json.dumps({"prompt_ids": prompt, "response_ids": response}) + "\n")
    return path


@pytest.fixture(scope="module")
def head(lines, tmp_path_factory):
    out = tmp_path_factory.mktemp("heads") / "head"
    flags = ["--data", str(lines), "--draft-vocab", "100", "--intermediate", "64"]
    assert main(["drafter", "init", *PAIR, "--out", str(out), *flags]) == 0
    return out


def test_server_loads_a_new_drafter(head, lines):
    target = demo_target()
    assert feature_layers(head, target.config) == LAYERS
    drafter = Eagle3.load(head, target)
    config = ModelConfig.read(head)
    assert config.max_position == 4096 and config.rope == target.config.rope
    counts = np.zeros(512, np.int64)
    for token_T, counted_T in read_documents([lines], LIMITS, TARGET):
        np.add.at(counts, token_T[counted_T], 1)
    drafted = set(drafter.target_ids.tolist())
    assert len(drafted) == 100 and set(target.eos_token_ids) <= drafted
    left_out = [counts[token] for token in range(512) if token not in drafted]
    assert max(left_out) <= min(counts[t] for t in drafted - set(target.eos_token_ids))
    logits = drafter.logits(torch.randn(3, 256))
    assert torch.isfinite(logits).all() and logits.shape == (3, 100)


def test_eagle1_drafter_starts_without_its_own_head(head, tmp_path, capsys):
    out = tmp_path / "eagle1"
    assert main(["drafter", "init", *PAIR, "--network", "eagle1", "--out", str(out)]) == 0
    config = ModelConfig.read(TARGET)
    layers = feature_layers(out, config)
    target = load_target(TARGET, numerics=Numerics("strict"), feature_layers=layers)
    drafter = Eagle1.load(out, target)
    assert drafter.target_ids.tolist() == list(range(config.vocab_size))
    assert torch.isfinite(drafter.logits(torch.randn(3, 256))).all()
    again = ["--network", "eagle1", "--start-from", str(out), "--out", str(tmp_path / "again")]
    assert main(["drafter", "init", *PAIR, *again]) == 0
    before, after = (load_file(x / "model.safetensors") for x in (out, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    capsys.readouterr()
    other = ["--network", "eagle1", "--start-from", str(head), "--out", str(tmp_path / "other")]
    assert main(["drafter", "init", *PAIR, *other]) == 2
    assert "start from another drafter" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--seed", "9" * 24), ("--intermediate", "1000000000")])
def test_numbers_beyond_their_bounds_are_refused(tmp_path, capsys, flags):
    with pytest.raises(SystemExit):
        main(["drafter", "init", *PAIR, "--out", str(tmp_path / "out"), *flags])
    assert "not a whole number from" in capsys.readouterr().err


def test_draft_vocabulary_ties_go_to_the_lower_ids():
    counts = np.array([0, 5, 0, 5, 1, 0, 0])
    assert draft_vocabulary(counts, 4, always=(6,)).tolist() == [1, 3, 4, 6]
    assert draft_vocabulary(counts, 5, always=(6,)).tolist() == [0, 1, 3, 4, 6]
    assert draft_vocabulary(counts, 99, always=()).tolist() == list(range(7))


def test_drafter_init_start_from_keeps_the_given_weights(head, lines, tmp_path, capsys):
    def started(name, *flags):
        flags = ["--start-from", str(head), "--out", str(tmp_path / name), *flags]
        return main(["drafter", "init", *PAIR, *flags])

    assert started("same", "--data", str(lines), "--draft-vocab", "100") == 0
    assert started("wider", "--draft-vocab", "300", "--seed", "4") == 0
    before, same, wider = (
        load_file(where / "model.safetensors")
        for where in (head, tmp_path / "same", tmp_path / "wider")
    )
    assert before.keys() == same.keys() and all(torch.equal(before[n], same[n]) for n in before)
    assert torch.equal(wider["fc.weight"], before["fc.weight"])
    old, new = (x["d2t"] + torch.arange(len(x["d2t"])) for x in (before, wider))
    for token in set(old.tolist()) & set(new.tolist()):
        rows = [
            x["lm_head.weight"][(ids == token).nonzero()[0, 0]]
            for x, ids in ((before, old), (wider, new))
        ]
        assert torch.equal(*rows)
    assert started("other", "--intermediate", "128") == 2
    assert "leave --intermediate out" in capsys.readouterr().err


def train(head, lines, out, *flags):
    small = ["--budget", "256", "--unroll", "2", "--device", "cpu", "--drafter", str(head)]
    return main(
        ["drafter", "train", *PAIR, *small, "--data", str(lines), "--out", str(out), *flags]
    )


def test_training_resumes_from_a_checkpoint_with_the_same_bits(head, lines, tmp_path, capsys):
    before = torch.get_num_threads()
    assert train(head, lines, tmp_path / "whole", "--steps", "4", "--threads", "1") == 0
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    saved = ("--steps", "4", "--checkpoints", str(tmp_path / "saved"), "--save-every", "2")
    assert train(head, lines, tmp_path / "first", *saved) == 0
    (newest,) = (tmp_path / "saved").glob("*4.safetensors")
    newest.write_bytes(newest.read_bytes()[:-1])
    capsys.readouterr()
    assert train(head, lines, tmp_path / "again", *saved) == 0
    said = capsys.readouterr().err
    assert f"{newest}: not a whole checkpoint" in said and "resumed from" in said
    assert "loss" in said and "tokens/s" in said
    states = [load_file(tmp_path / n / "model.safetensors") for n in ("whole", "first", "again")]
    for name, tensor in states[0].items():
        assert all(torch.equal(tensor, other[name]) for other in states[1:]), name
    before = load_file(head / "model.safetensors")
    assert (states[0]["fc.weight"] != before["fc.weight"]).any()
    assert torch.equal(states[0]["d2t"], before["d2t"])


def test_checkpoints_of_a_different_drafter_are_refused(head, lines, tmp_path, capsys):
    saved = ("--steps", "1", "--checkpoints", str(tmp_path / "saved"))
    assert train(head, lines, tmp_path / "first", *saved) == 0
    assert train(tmp_path / "first", lines, tmp_path / "second", *saved) == 2
    assert "drafter is" in capsys.readouterr().err and not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--budget", "8", "--unroll", "7"), "too small for 7"), (("--unroll", "500"), "1 to 64")],
)
def test_unfit_packs_and_steps_are_refused(head, lines, tmp_path, capsys, flags, words):
    try:
        status = train(head, lines, tmp_path / "out", "--steps", "1", *flags)
    except SystemExit as error:
        status = error.code
    assert status == 2 and words in capsys.readouterr().err


def test_stop_at_flag_without_a_record_is_refused(head, lines, tmp_path, capsys):
    assert train(head, lines, tmp_path / "out", "--stop-at", "3") == 2
    assert "name some that are not trained on as --record" in capsys.readouterr().err


def test_an_out_directory_in_use_is_refused(head, lines, capsys):
    assert train(head, lines, head, "--steps", "1") == 2
    assert "not an empty directory" in capsys.readouterr().err


def test_data_without_a_trainable_token_is_refused(head, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2, 3, 4], "response_ids": [5]}\n')
    assert train(head, path, tmp_path / "out", "--steps", "1") == 2
    assert "nothing to learn" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == [path]


def test_a_device_without_room_is_an_error_with_a_remedy(
    head, lines, tmp_path, capsys, monkeypatch
):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14 GiB.\nand more")

    monkeypatch.setattr(train_command, "load_prefill", full)
    assert train(head, lines, tmp_path / "out", "--steps", "1") == 2
    said = capsys.readouterr().err
    assert said.startswith("tlt: the memory of cpu is too small") and said.count("\n") == 1
    assert "14 GiB" in said
    with pytest.raises(StartupError, match="take --device cpu"), memory_refused("cuda"):
        full()


def test_gpu_unsupported_by_the_kernels_is_not_chosen(monkeypatch):
    monkeypatch.setattr(device, "look", lambda: Gpu("old", unusable="old has capability 8.0"))
    assert device_of(None) == device_of("cpu") == "cpu"
    with pytest.raises(StartupError, match=r"capability 8\.0; use --device cpu"):
        device_of("cuda")
    monkeypatch.setattr(device, "look", lambda: Gpu("new"))
    assert device_of(None) == device_of(None, "cuda") == device_of("cuda", "cpu") == "cuda"
    assert device_of(None, "cpu") == "cpu"


def test_conversations_are_encoded_like_requests_of_a_server(tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [("user", "1+2?"), ("assistant", "3"), ("user", "3+4?"), ("assistant", "7")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text("\n" + json.dumps({"messages": messages, "source": "x"}) + "\n\n")
    ((token_T, counted_T),) = read_documents([path], LIMITS, TARGET)
    from tlt_server.frontend.generation.text import Text

    text = Text.load(TARGET)
    assert (
        token_T.tolist()[: int(counted_T.argmax())]
        == text.encode([text.render(messages[:1])], special=False)[0]
    )
    answers = text.decode(token_T[counted_T].tolist(), special=True)
    assert answers == "3<|im_end|>\n7<|im_end|>\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_ids": [1], "response_ids": [2, 512]}', "id 512 at 1, .* vocabulary has 512"),
        ('{"prompt_ids": [1, -3], "response_ids": [2]}', "id -3 at 1"),
        ('{"prompt_ids": [true], "response_ids": [2]}', "Expected `int`"),
        ('{"prompt_ids": [1]}', "neither 'prompt_ids' with 'response_ids' nor 'messages'"),
        ('{"prompt_ids": [1], "response_ids": [1], "messages": []}', "give one of them"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of role 'assistant'"),
        ('{"messages": [{"role": "user"}]}', "missing required field `content`"),
        ("[1, 2]", "not a line of training data"),
        ('{"prompt_ids": [1', "not a line of training data"),
        (f'{{"prompt_ids": {[1] * 4000}, "response_ids": {[2] * 97}}}', "4097 tokens, .* 4096"),
    ],
)
def test_invalid_line_is_refused_by_file_and_line_number(tmp_path, line, words):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt_ids": [1], "response_ids": [2]}\n' + line + "\n")
    with pytest.raises(StartupError, match=rf"data\.jsonl:2: .*{words}"):
        read_documents([path], LIMITS, TARGET)


def test_ten_million_token_line_is_refused_unparsed(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt_ids": [1], "response_ids": [' + b"2," * 10_000_000 + b"2]}\n")
    size = path.stat().st_size
    with pytest.raises(StartupError, match=rf"data\.jsonl:1: {size} bytes, .* at most 16777216"):
        read_documents([path], LIMITS, TARGET)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_files_without_data_are_refused(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(StartupError, match="no data for this target"):
        read_documents([path], LIMITS, TARGET)
    with pytest.raises(StartupError, match="No such file"):
        read_documents([tmp_path / "none"], LIMITS, TARGET)


def test_data_with_too_many_tokens_in_total_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_TOKENS", 5)
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt_ids": [1], "response_ids": [2, 3]}\n' * 2)
    with pytest.raises(StartupError, match="data.jsonl:2: 6 tokens so far, the limit is 5"):
        read_documents([path], LIMITS, TARGET)


def test_segments_of_a_server_are_read_and_damaged_parts_named(tmp_path, capsys):
    header, path = SegmentHeader.of(identity_of(TARGET), 512), tmp_path / "0.segment"
    samples = [sample(prompt, output=9) for prompt in range(3)]
    moved = {"spans": [(3, "v0")], "first_root": 7}  # another engine began it
    samples[2] = msgspec.structs.replace(sample(2, output=9, accepted=2), **moved)
    frames = b"".join(recorded(n, each)[1] for n, each in enumerate(samples))
    path.write_bytes(header_bytes(header) + frames)
    found = read_documents([path], LIMITS, TARGET)
    assert [d.token_T.tolist() for d in found] == [s.token_T.tolist() for s in samples]
    assert found[0].counted_T.tolist() == [False] * 4 + [True] * 9
    assert found[2].counted_T.tolist() == [False] * 7 + [True] * 6
    path.write_bytes(path.read_bytes()[:-3])
    assert len(read_documents([path], LIMITS, TARGET)) == 2
    assert str(path) in capsys.readouterr().err
    path.write_bytes(header_bytes(SegmentHeader(1, 600, "another", "")) + frames)
    with pytest.raises(StartupError, match="no data for this target"):
        read_documents([path], LIMITS, TARGET)
    assert "600" in capsys.readouterr().err
