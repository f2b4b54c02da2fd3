"""Readers: each public format by hand-written lines, detection, and what a broken file gives."""

import gzip
import json

import numpy as np
import pytest
from fineserve_traces import TraceError, read_lengths, read_trace, read_vllm_bench
from tracefilekit import AZURE, BROKEN, BURSTGPT, CSV


@pytest.fixture
def write(tmp_path):
    def to_file(content, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to_file


def test_plain_csv(write):
    trace = read_trace(write(CSV + "0.5,3,4\n2,10000000,1\n"), model="llama")
    assert trace.arrival_s.tolist() == [0.5, 2.0]
    assert trace.prompt_tokens.tolist() == [3, 10_000_000]
    assert trace.output_tokens.tolist() == [4, 1]
    assert trace.models == ("llama",)
    assert trace.source == "trace.csv (csv)"


def test_gzip_is_told_by_content_and_columns_by_name(write):
    text = "output_tokens,note,prompt_tokens,arrival_s\n7,x,8,0\n"
    trace = read_trace(write(gzip.compress(text.encode()), "trace.dat"))
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (8, 7)


def test_excel_style_file(write):
    trace = read_trace(write(b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode() + b"0,3,4\r\n1,5,6\r\n"))
    assert trace.output_tokens.tolist() == [4, 6]


def test_arena_models_are_ordered_by_number(write):
    path = write("arrival_s,model,prompt_tokens,output_tokens\n0,10,1,1\n1,9,1,1\n2,10,1,1\n3,gpt,1,1\n")
    trace = read_trace(path, "arena")
    assert trace.models == ("9", "10", "gpt")
    assert trace.model.tolist() == [1, 0, 1, 2]
    with pytest.raises(TraceError, match="no column 'model'"):
        read_trace(write(CSV + "0,1,1\n"), "arena")


def test_azure_as_published(write):
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:16:46.6805901,5,0\n"
    trace = read_trace(write(AZURE + rows))
    assert trace.arrival_s == pytest.approx([0, 4.314579], abs=1e-9)
    assert trace.dropped_rows == 1
    assert trace.source == "trace.csv (azure), 1 rows with zero tokens dropped"


def test_azure_2024_times_with_a_zone_and_without_fraction(write):
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:02+00:00,2399,6\n"
    assert read_trace(write(AZURE + rows)).arrival_s == pytest.approx([0, 1.99007], abs=1e-9)


def test_azure_reduced_file_by_name(write):
    assert len(read_trace(write(CSV + "0,3,4\n"), "azure")) == 1


def test_burstgpt(write):
    rows = (
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,GPT-4,1087,230,1317,API log\n"
        "118,ChatGPT,417,0,417,Conversation log\n"
    )
    trace = read_trace(write(BURSTGPT + rows))
    assert trace.arrival_s.tolist() == [0.0, 40.0]
    assert [trace.models[index] for index in trace.model] == ["ChatGPT", "GPT-4"]
    assert trace.output_tokens.tolist() == [18, 230]
    assert trace.dropped_rows == 1


def test_mooncake(write):
    lines = (
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n\n'
        '{"timestamp": 3000, "input_length": 512, "output_length": 6, "hash_ids": [0]}\n'
    )
    trace = read_trace(write(lines, "t.jsonl"))
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert trace.prefix_hashes == ((0, 1), (0,))
    assert trace.prefix_block_tokens == 512
    assert trace.prefix_tokens.tolist() == [600, 512]  # the last block of a prompt may be full in part


BENCH = {
    "model_id": "qwen",
    "input_lens": [10, 20, 30],
    "output_lens": [3, 0, 2],
    "start_times": [101.5, 100.5, 100.0],
    "ttfts": [0.1, 0.0, 0.2],
    "itls": [[0.01, 0.02], [], [0.03]],
    "errors": ["", "timeout", ""],
}


def test_vllm_bench_sorted_by_sending_and_failures_dropped(write):
    result = read_vllm_bench(write(json.dumps(BENCH), "bench.json"))
    assert result.trace.arrival_s.tolist() == [0.0, 1.5]
    assert result.trace.prompt_tokens.tolist() == [30, 10]
    assert result.trace.models == ("qwen",)
    assert result.trace.dropped_rows == 1
    assert result.ttft_s.tolist() == [0.2, 0.1]
    assert [gaps.tolist() for gaps in result.itl_s] == [[0.03], [0.01, 0.02]]
    assert len(read_trace(write(json.dumps(BENCH), "bench.json"))) == 2


def test_vllm_bench_says_what_is_missing(write):
    no_starts = {key: value for key, value in BENCH.items() if key != "start_times"}
    path = write(json.dumps(no_starts), "bench.json")
    with pytest.raises(TraceError, match="no per-request list start_times; use a vLLM that writes start_times"):
        read_trace(path)
    lengths = read_lengths(path)
    assert (lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist()) == ([10, 30], [3, 2])
    assert lengths.dropped_rows == 1
    with pytest.raises(TraceError, match=r"input_lens.*--save-detailed"):
        read_lengths(write('{"request_throughput": 3}', "bench.json"))
    with pytest.raises(TraceError, match="2 start_times for 3 requests"):
        read_trace(write(json.dumps(BENCH | {"start_times": [1, 2]}), "bench.json"))
    with pytest.raises(TraceError, match="1 ttfts and 3 itls for 3 requests"):
        read_vllm_bench(write(json.dumps(BENCH | {"ttfts": [1]}), "bench.json"))


CONVERSATIONS = [
    {"conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 9}]},
    {
        "conversations": [
            {"from": "gpt", "value": "hello"},
            {"from": "user", "value": "abc"},
            {"from": "bing", "value": "d"},
        ]
    },
    {"conversations": [{"from": "human", "value": "no reply"}]},
    {"conversations": []},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]},
]


def test_sharegpt_json_without_a_tokenizer_says_so(write):
    pairs = read_lengths(write(json.dumps(CONVERSATIONS), "sg.json"))
    assert pairs.prompt_tokens.tolist() == [10, 1]
    assert pairs.output_tokens.tolist() == [3, 1]
    assert pairs.dropped_rows == 3
    assert pairs.source == "sg.json (ShareGPT JSON, first turns, 4 characters a token)"


def test_sharegpt_json_with_a_tokenizer(write):
    pairs = read_lengths(write(json.dumps(CONVERSATIONS), "sg.json"), count_tokens=len)
    assert pairs.prompt_tokens.tolist() == [40, 3]
    assert "caller's tokenizer" in pairs.source


def test_sharegpt_errors(write):
    with pytest.raises(TraceError, match="row 1: no list 'conversations'"):
        read_lengths(write('[{"text": 1}]', "sg.json"))
    with pytest.raises(TraceError, match="row 1: a turn without 'from' and 'value'"):
        read_lengths(write('[{"conversations": [{"role": "user"}]}]', "sg.json"))
    with pytest.raises(TraceError, match="a JSON list is none of the known formats"):
        read_trace(write(json.dumps(CONVERSATIONS), "sg.json"))


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_broken_file_gives_one_clear_line(write, content, message):
    path = write(content)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert message in str(error.value)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_folder_and_unknown_format(write, tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.csv: no such file"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="unknown format 'azur'; known are csv, arena, azure"):
        read_trace(write(CSV + "0,1,1\n"), "azur")


def test_not_strict_sorts_and_keeps_ties_in_file_order(write):
    trace = read_trace(write(CSV + "5,1,1\n4,2,1\n5,3,1\n"), strict=False)
    assert trace.arrival_s.tolist() == [4, 5, 5]
    assert trace.prompt_tokens.tolist() == [2, 1, 3]


def test_out_of_order_recorded_times_count_from_the_earliest(write):
    rows = "9,m,1,1,2,x\n7,m,2,1,3,x\n"
    with pytest.raises(TraceError, match=r"row 2, column Timestamp: 0 is earlier than the row before it \(2\)"):
        read_trace(write(BURSTGPT + rows))
    assert read_trace(write(BURSTGPT + rows), strict=False).prompt_tokens.tolist() == [2, 1]


@pytest.mark.slow
def test_a_million_rows_are_read_in_seconds(write):
    rows = "\n".join(f"{index},7,9" for index in range(1_000_000))
    trace = read_trace(write(CSV + rows))
    assert len(trace) == 1_000_000
    assert np.all(trace.output_tokens == 9)
