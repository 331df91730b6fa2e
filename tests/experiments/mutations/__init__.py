"""Whether the tests notice when the code is broken: one change at a time, and the tests of that file.

python -m tests.experiments.mutations run --reached build/reached.jsonl --results build/mutations.jsonl
python -m tests.experiments.mutations report --results build/mutations.jsonl --output build/mutations.md
"""
