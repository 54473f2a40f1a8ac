"""The EBNF of SGLang's users: which texts a grammar takes, and which it does not."""

from __future__ import annotations

import pytest
from grammar_sampler import accept_all
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler
from jaxserve.grammar.ebnf import parse
from jaxserve.grammar.lark import to_lark
from jaxserve.types import Grammar


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        ('root ::= "a" | "b"', ["a", "b"], ["", "ab", "c"]),
        ('root ::= "a"* "b"+ "c"?', ["b", "aab", "abbc"], ["", "a", "abcc"]),
        ('root ::= "a"{2} [b-d]{1,} "e"{0,2} "f"{ 1 , 3 }', ["aabf", "aadcbefff"], ["abf", "aaf", "aabeeef", "aabffff"]),
        ('root ::= ("x" | y | ())\ny ::= "yy"', ["x", "yy", ""], ["y", "xy"]),
        ('root ::= "a" (\n  "b"\n  | "c"\n) "d"', ["abd", "acd"], ["ad", "abcd"]),
        ('root::="a"#comment "b"\n# root ::= "c"\n"d"', ["ad"], ["a", "ab", "abd"]),
        (r'root ::= [^a-y"\\] [\]\-^] [a-] [-a]', ["z]a-", "z--a", "z^aa"], ["a]aa", "zxaa", '"]aa']),
        (r'root ::= "\x41\u0042\U00000043\u{44}\"\\\/\n"', ['ABCD"\\/\n'], ["ABCD"]),
        ('root ::= . "b"', ["ab", "bb", "éb"], ["b", "\nb"]),
        ('root ::= [^] "b"', ["ab", "\nb"], ["b"]),
        ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "(()", ")("]),
        ('root ::= "[" (item ("," item)*)? "]"\nitem ::= root | [0-9]+', ["[]", "[1,22,[3]]", "[[[7]]]"], ["[,]", "[1,]"]),
        ('root ::= a.b a-c a_d\na.b ::= "1"\na-c ::= "2"\na_d ::= "3"', ["123"], ["12"]),
        ('root ::= ROOT Root start\nROOT ::= "1"\nRoot ::= "2" | "(" Root ")"\nstart ::= "3"', ["123", "1((2))3"], ["1(2"]),
        ('root ::= a b\na ::= "x" b?\nb ::= "y" a | "z"', ["xz", "xyxz", "xzz"], ["x", "yz"]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, taken: list[str], refused: list[str]
) -> None:
    compiled = compiler.submit(Grammar("ebnf", text)).result()
    for output in taken + refused:
        ids = tokenizer.encode(output, add_special_tokens=False).ids
        matcher = compiled.matcher()
        is_taken = accept_all(matcher, ids) == len(ids) and matcher.may_end
        assert is_taken == (output in taken), output


def test_what_needs_no_parser_becomes_a_terminal() -> None:
    lark = to_lark(parse('root ::= list | word\nlist ::= "[" list* word "]"\nword ::= letter+\nletter ::= [a-z/é]'))
    assert lark.splitlines() == [
        "%llguidance {}",
        "start: r0",
        "r0: r1 | T2",
        'r1: "[" (r1)* T2 "]"',
        "T2: (T3)+",
        r"T3: /[a-z\u{2f}\u{e9}]/",
    ]
