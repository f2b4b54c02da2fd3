"""Trace files of the public formats, and broken ones with what is said of each."""

from __future__ import annotations

import gzip

CSV = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}\n'

BROKEN = [
    ("", ": the file is empty"),
    (" \n\n", ": the file is empty"),
    (CSV, ": a header but no rows"),
    (CSV + "0,1,1\nnan,1,1\n", ", row 2, column arrival_s: nan is not a time"),
    (CSV + "0,1,1\n-1,1,1\n", ", row 2, column arrival_s: -1 is negative"),
    (CSV + "0,1,1\n5,1,1\n4,1,1\n", ", row 3, column arrival_s: 4 is earlier than the row before it (5)"),
    (CSV + "0,0,1\n", ", row 1, column prompt_tokens: 0 is too few tokens; give a whole number >= 1"),
    (CSV + "0,1,1\n1,1,0\n", ", row 2, column output_tokens: 0 is too few tokens"),
    (CSV + "0,1,1\n1,1,-3\n", ", row 2, column output_tokens: -3 is too few tokens"),
    (CSV + "0,nan,1\n", ", row 1, column prompt_tokens: nan is not a number of tokens"),
    (CSV + "0,1.5,1\n", ", row 1, column prompt_tokens: 1.5 is not a whole number of tokens"),
    (CSV + "0,1,1\n1,1e300,1\n", ", row 2, column prompt_tokens: 1e+300 is too many tokens"),
    (CSV + "0,1,1\n1,many,1\n", ", row 2, column prompt_tokens: 'many' is not a number"),
    (CSV + "0,1,1\n1,,1\n", ", row 2, column prompt_tokens: '' is not a number"),
    (CSV + "0,1,1\n1,2\n", ", line 3: 2 values, but the header has 3 columns"),
    (CSV + "0,1,1\n1,2,3,4\n", ", line 3: 4 values, but the header has 3 columns"),
    ("arrival_s,promt_tokens,output_tokens\n0,1,1\n", ": no column 'prompt_tokens' (did you mean 'promt_tokens'?)"),
    ("arival_s,prompt_tokens,output_tokens\n0,1,1\n", ": no column 'arrival_s' (did you mean 'arival_s'?)"),
    (
        "prompt_tokens,output_tokens\n1,1\n",
        ": no column 'arrival_s' in ['prompt_tokens', 'output_tokens']; a trace has",
    ),
    (
        "time,name,prompt,output\n0,A,1,1\n",
        "; a trace has arrival_s, prompt_tokens, output_tokens and, for several models, model",
    ),
    ("arrival_s,prompt_tokens,output_tokens,arrival_s\n0,1,1,1\n", ": column 'arrival_s' is in the header twice"),
    ("day,hour\n0,1\n", ": unknown columns ['day', 'hour']; known headers are csv: arrival_s"),
    ((CSV + "0,1,1\n").encode() + b"1,\xff,1\n", ", line 3: byte 0xff is not UTF-8"),
    (gzip.compress(CSV.encode() * 50, mtime=0)[:-9], ": the gzip file is cut short"),
    (gzip.compress(CSV.encode() * 50, mtime=0)[:20], ": the gzip file is cut short"),
    (b"\x1f\x8b" + b"\x00" * 30, ": the gzip file is damaged"),
    (AZURE + "yesterday,1,1\n", ", row 1, column TIMESTAMP: 'yesterday' is not a time"),
    (
        AZURE + "2023-11-16 18:15:46,1,1\n3023-11-16 18:15:46,1,1\n",
        ", row 2, column TIMESTAMP: '3023-11-16 18:15:46' is not",
    ),
    (AZURE + "2023-11-16 18:15:46,0,0\n", " (azure), 1 rows with zero tokens dropped: the trace is empty"),
    ("{nothing", ", line 1: not JSON"),
    ('{"timestamp": 0, "input_length": 1}\n', ", row 1: no field 'output_length'"),
    ('{"timestamp": 0, "input_length": 1, "output_len": 1}\n', "'output_length' (did you mean 'output_len'?)"),
    (MOONCAKE.replace("9", '"9"'), ", row 1, column input_length: '9' is not a number"),
    (MOONCAKE.replace("[]", '"x"'), ", row 1, column hash_ids: not a list of integers"),
    (MOONCAKE.replace("9", "9" * 400), ", row 1, column input_length: more digits than"),
    (
        MOONCAKE + MOONCAKE.replace("9", "9" * 5000),
        ", row 2: not JSON that can be read (a number of thousands of digits)",
    ),
    (MOONCAKE + "[]\n", ", row 2: not a JSON object"),
    (MOONCAKE + "{x\n", ", row 2: not JSON"),
]
