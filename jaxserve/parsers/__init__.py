"""What a model's text means: thinking, an answer, calls of tools. Knows text only: no HTTP, no protocol, no tokens.

    text as it comes -> MessageParser (reasoning parser, then tool parser) -> Reasoning, Content, CallBegin, CallArguments

A format is one file in `reasoning` or `tools`; `message` puts the two together and has the names that the options take.
"""
