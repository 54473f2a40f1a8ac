"""GrammarCompiler: results are shared, errors are sentences, and no grammar takes the process or the others down with it."""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Iterator

import pytest
from grammar_sampler import allow_all, allowed_ids

from jaxserve.grammar import GrammarCompiler, GrammarError
from jaxserve.grammar.setup import Setup
from jaxserve.grammar.trial import TrialProcess
from jaxserve.types import Grammar, GrammarKind

EOS = (2041,)
TAKES_MEMORY = Grammar("regex", "".join(f"(.*{i})?" for i in range(1500)))
# An intersection of ever longer patterns.
TAKES_TIME = Grammar(
    "json_schema",
    json.dumps({"allOf": [{"type": "string", "pattern": f".*(a|b).{{{n}}}c{n}"} for n in range(30)]}),
)
_DEPTH = 15_000
NESTED_DEEP = Grammar(
    "ebnf", "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(_DEPTH)) + f'r{_DEPTH} ::= "b" | r{_DEPTH} "a"'
)


@pytest.fixture
def own_compiler(tokenizer_json: str) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer_json, 2048, EOS, timeout_s=1.5)
    for lane in (made._first, made._second):
        lane.trial._memory_bytes = 8 << 30  # a fast machine may come to the usual bound before the time is over
    yield made
    made.close()


def problem(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> str:
    with pytest.raises(GrammarError) as caught:
        compiler.submit(Grammar(kind, text)).result()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(ab", "regex: the regular expression is not valid: unclosed group."),
        ("regex", "a(?=b)", "look-around, including look-ahead and look-behind, is not supported."),
        ("regex", "a" + 3 * "\\", "regex: the regular expression is not valid: it ends with a lone backslash."),
        ("regex", r"(a)\1", "backreferences are not supported."),
        ("regex", r"\bfoo", "regex: the regular expression is not valid: lookarounds not supported yet"),
        ("regex", "(" * 3000 + ")" * 3000, "regex: the regular expression is not valid: "),
        ("regex", r"[^\x00-\U0010FFFF]", "regex: no text can match this grammar."),
        ("json_schema", "{", "json_schema is not valid JSON: Expecting property name enclosed in double quotes: line 1"),
        ("json_schema", '{}}, {"lark_grammar": "start: x"', "json_schema is not valid JSON: Extra data"),
        ("json_schema", '{"minimum": NaN}', "json_schema is not valid JSON: NaN is not a JSON number."),
        ("json_schema", "[" * 100_000 + "]" * 100_000, "json_schema is nested too deeply."),
        ("json_schema", '{"items":' * 500 + "{}" + "}" * 500, "json_schema is nested too deeply."),
        ("json_schema", '{"items":' * 150 + "{}" + "}" * 150, "json_schema: recursion limit exceeded"),
        ("json_schema", "[1]", "json_schema: schema must be an object or boolean."),
        ("json_schema", '{"type": "strin"}', "json_schema: Invalid type: strin."),
        ("json_schema", '{"not": {}}', 'json_schema: Unimplemented keys: ["not"].'),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)."),
        ("json_schema", "false", "json_schema: Unsatisfiable schema: schema is false."),
        ("json_schema", '{"$ref": "#/$defs/x"}', "json_schema: Pointer '/$defs/x' does not exist."),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}', "Default retriever does not fetch resources."),
        ("json_schema", '{"$ref": "#"}', "json_schema: no text can match this grammar."),
        ("ebnf", 'start: "a"', "ebnf: a rule (name ::= ...) is expected (line 1, before 'start: "),
        ("ebnf", 'rule ::= "a"', "ebnf: there is no rule named root"),
        ("ebnf", 'root ::= "a" other', "ebnf: rule root refers to other, which is not defined."),
        ("ebnf", 'root ::= "a"\nroot ::= "b"', "ebnf: rule root is defined twice"),
        ("ebnf", 'root ::= ("a" | "b"', "ebnf: a closing parenthesis is expected (line 1, at the end)."),
        ("ebnf", 'root ::= "a" (="b") "b"', "ebnf: a closing parenthesis is expected (line 1, before '=\"b\") \"b\"')."),
        ("ebnf", 'root ::= "a\nb"', "ebnf: a literal or a character class does not end in its line (line 1, before '\"a')."),
        ("ebnf", "root ::= [z-a]", "ebnf: the range z-a is empty"),
        ("ebnf", r'root ::= "\ud800"', r"ebnf: \ud800 is not a character"),
        ("ebnf", 'root ::= "a"{3,2}', "ebnf: {3,2} asks for at least 3 and at most 2"),
        ("ebnf", 'root ::= "a"**', "ebnf: * cannot be repeated without parentheses"),
        ("ebnf", "root ::= " + "(" * 200, "ebnf: parentheses may be nested at most 64 deep"),
        ("ebnf", "root ::= root", "ebnf: no text can match this grammar."),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said_in_a_sentence(compiler: GrammarCompiler, kind: GrammarKind, text: str, words: str) -> None:
    sentence = problem(compiler, kind, text)
    assert words in sentence, sentence
    assert sentence.startswith(kind) and sentence.endswith(".") and "\n" not in sentence and len(sentence) < 400, sentence


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "[a-f]{1,4}")
    first = compiler.submit(grammar).result()
    again = compiler.submit(Grammar("regex", "[a-f]{1,4}"))
    assert again.done and again.result() is first
    assert compiler.submit(Grammar("ebnf", "root ::= [a-f]{1,4}")).result() is not first


def test_the_grammars_not_asked_for_longest_are_forgotten(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.grammar.compiler._CACHE_ENTRIES", 3)
    monkeypatch.setattr(compiler, "_cache", collections.OrderedDict())
    first = [compiler.submit(Grammar("regex", f"y{i}")).result() for i in range(3)]
    compiler.submit(Grammar("regex", "y0"))
    compiler.submit(Grammar("regex", "y3")).result()
    assert [grammar.text for grammar in compiler._cache] == ["y2", "y0", "y3"]
    assert compiler.submit(Grammar("regex", "y0")).result() is first[0]
    assert compiler.submit(Grammar("regex", "y1")).result() is not first[1]


def test_a_grammar_that_takes_too_long_is_given_up_and_delays_only_its_like(own_compiler: GrammarCompiler) -> None:
    slow = own_compiler.submit(TAKES_TIME)
    quick = [own_compiler.submit(Grammar("regex", f"x{i}")) for i in range(3)]
    for future in quick:
        future.result()
    assert not slow.done
    with pytest.raises(GrammarError, match=r"json_schema: the grammar takes longer than 1\.5 s to compile\."):
        slow.result()
    assert own_compiler.submit(TAKES_TIME).done is False  # it may have been the machine's fault


@pytest.mark.parametrize("grammar", [TAKES_MEMORY, NESTED_DEEP], ids=["memory", "depth"])
def test_a_grammar_that_would_end_the_process_is_refused(tokenizer_json: str, grammar: Grammar) -> None:
    trial = TrialProcess(Setup(tokenizer_json, 2048, EOS), 60.0, memory_bytes=48 << 20)
    try:
        with pytest.raises(GrammarError, match="is nested too deeply or takes too much memory to compile"):
            trial.check(grammar)
        trial.check(Grammar("regex", "fine"))
    finally:
        trial.close()


def test_asking_does_not_wait(own_compiler: GrammarCompiler) -> None:
    began = time.perf_counter()
    future = own_compiler.submit(TAKES_TIME)
    assert not future.done
    assert time.perf_counter() - began < 0.1


def test_what_nobody_waits_for_is_not_begun_and_can_be_asked_for_again(own_compiler: GrammarCompiler) -> None:
    own_compiler.submit(TAKES_TIME)
    grammar = Grammar("regex", "abandoned")
    future = own_compiler.submit(grammar)
    future.abandon()
    own_compiler.submit(Grammar("regex", "next")).result()
    assert not future.done
    own_compiler.submit(grammar).result()


def test_closing_ends_what_is_being_compiled_and_leaves_no_process(tokenizer_json: str) -> None:
    compiler = GrammarCompiler(tokenizer_json, 2048, EOS, timeout_s=60.0)
    compiler.submit(Grammar("regex", "a")).result()
    future = compiler.submit(TAKES_TIME)
    pid = compiler._first.trial._child.pid
    compiler.close()
    with pytest.raises(GrammarError):
        future.result()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("tokenizer_json", [None, ""])
def test_without_a_fast_tokenizer_there_is_a_sentence(tokenizer_json: str | None) -> None:
    compiler = GrammarCompiler(tokenizer_json, 2048, EOS)
    assert problem(compiler, "regex", "a").startswith("regex needs a fast tokenizer")


def test_a_tokenizer_that_does_not_fit_the_model_is_a_sentence(tokenizer_json: str) -> None:
    compiler = GrammarCompiler(tokenizer_json, 100, (1,))
    assert "not possible with this model's tokenizer: vocab size too small" in problem(compiler, "regex", "a")


def test_a_model_without_eos_ends_with_its_grammar(tokenizer_json: str) -> None:
    compiler = GrammarCompiler(tokenizer_json, 2048, ())
    try:
        matcher = compiler.submit(Grammar("regex", "ab?")).result().matcher()
    finally:
        compiler.close()
    mask = allow_all(1, 2048)[0]
    ids = []
    while not matcher.is_terminated:
        matcher.fill_mask(mask)
        ids.append(int(allowed_ids(mask)[0]))
        assert matcher.accept(ids[-1])
    assert len(ids) in (1, 2)
