"""English-looking text that never ends, made from a seed: what `random` prompts are cut from. Nothing is downloaded."""

from __future__ import annotations

import numpy as np

_WORD_LIST = """
the of and a to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my made over did down only way
find use may water long little very after words called just where most know get through back much before go good new
write our used me man too any day same right look think also around another came come work three word must because does
part even place well such here take why things help put years different away again off went old number great tell men
say small every found still between name should home big give air line set own under read last never us left end along
while might next sound below saw something thought both few those always looked show large often together asked house
world going want school important until form food keep children feet land side without boy once animals life enough took
sometimes four head above kind began almost live page got earth need far hand high year mother light parts country
father let night following picture being study second eyes soon times story boys since white days ever paper hard near
sentence better best across during today others however sure means knew try told young miles sun ways thing whole hear
example heard several change answer room sea against top turned learn point city play toward five using himself usually
money seen car morning given trees river engine machine memory market winter summer value letter garden window number
history science music language question table music surface bridge station island forest
"""
_WORDS = tuple(_WORD_LIST.split())
_SENTENCE_WORDS = (5, 16)


def text(rng: np.random.Generator, num_words: int) -> str:
    parts: list[str] = []
    while len(parts) < num_words:
        chosen = [_WORDS[i] for i in rng.integers(len(_WORDS), size=int(rng.integers(*_SENTENCE_WORDS)))]
        parts += [chosen[0].capitalize(), *chosen[1:-1], chosen[-1] + "."]
    return " ".join(parts[:num_words])
