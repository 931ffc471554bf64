"""A grammar that holds a model to valid actions while it samples, for vLLM's structured outputs (xgrammar's EBNF)."""

import json
from collections.abc import Collection, Mapping

from flowjax.canvas.operators.base import Operator

_TEXT_FORM = """
sequence ::= step (space "->" space step)*
step ::= unit | conditional
conditional ::= unit space "?" space (unit space ":" space branch | "done" space ":" space unit)
branch ::= "done" | unit
unit ::= single | repeated
single ::= call | "(" space sequence space ")" | parallel
repeated ::= single space "*" space count
parallel ::= "[" space member (space "," space member)+ space "]"
member ::= member_call | parallel | repeated | conditional | step (space "->" space step)+
call ::= operator details
member_call ::= member_operator details
space ::= " "?
count ::= [1-9] | "10"
id ::= [A-Za-z_] [A-Za-z0-9_]*
place ::= id | id ".condition" | id ".true" | id ".false"
number ::= [0-9] | [1-9] [0-9] | [1-9] [0-9] [0-9]
"""

_TAGGED = """
root ::= add | delete | modify | set_prompt | finish
add ::= "<action>add</action>" (one | several | either | again | written)
one ::= "<operator>" operator "</operator>" BACKEND where prompt?
several ::= "<structure>parallel</structure><operators>" member_operator ", " (members | members_told)
members ::= (member_operator ", ")* member_operator "</operators>" where
members_told ::= members_and_prompts prompt
members_and_prompts ::= member_operator "</operators>" where prompt | member_operator ", " members_and_prompts prompt
again ::= "<structure>loop</structure><operators>" (body | body_told)
body ::= (operator ", ")* operator "</operators>" how_often where
body_told ::= operator "</operators>" how_often where prompt | operator ", " body_told prompt
how_often ::= ("<count>" count "</count>")?
either ::= "<structure>conditional</structure><condition>" operator "</condition>" (both | passed | failed)
both ::= "<true>" operator "</true><false>" operator "</false>" where (prompt prompt prompt)?
passed ::= "<true>" operator "</true>" ("<false>done</false>")? where (prompt prompt)?
failed ::= "<true>done</true><false>" operator "</false>" where (prompt prompt)?
written ::= "<workflow>" sequence "</workflow>" where
where ::= ("<into>" place "</into>")? ("<position>" number "</position>")?
delete ::= "<action>delete</action><target>" id "</target>"
modify ::= "<action>modify</action><target>" id "</target>" modified
modified ::= "<operator>" operator "</operator>" BACKEND prompt? | "<count>" count "</count>" OR_BACKEND
set_prompt ::= "<action>set_prompt</action><target>" id "</target>" prompt
finish ::= "<action>finish</action>" ("<answer>" text? "</answer>")?
prompt ::= "<prompt>" text "</prompt>"
text ::= [^ \\t\\r\\n<] ([^<] | "<"+ [^<\\/])* | "<"+ [^<\\/] ([^<] | "<"+ [^<\\/])*
quoted ::= "\\"" ([^"\\\\<&\\r\\n\\t] | "&amp;" | "&lt;" | "&gt;" | "\\\\" ["\\\\nrt])* "\\""
"""

_COMPACT = """
root ::= add | delete | modify | prompt | finish
add ::= "add " sequence (" into " place)? (" at " number)?
delete ::= "delete " id
modify ::= "modify " id " " (call | "* " count OR_BACKEND)
prompt ::= "prompt " id " " text
finish ::= "finish" (" " text)?
text ::= [^ \\t\\r\\n] [^\\r\\n]*
quoted ::= "\\"" ([^"\\\\\\r\\n\\t] | "\\\\" ["\\\\nrt])* "\\""
"""


def schema(
    operators: Mapping[str, type[Operator]], backends: Collection[str] = (), *, compact: bool = False
) -> dict[str, str]:
    """What a request's `structured_outputs` takes: `extra_body={"structured_outputs": schema(operators)}`.

    The grammar has the action alone, without thinking or text before it (with a reasoning parser, vLLM applies it after
    the thinking), and no needless white space. All it lets through is read by strict parsing and has operators that
    exist, no combiner as a branch and no loop out of bounds; whether ids exist depends on the canvas. `compact` is the
    one-line form. Brackets may be deeper than what is read.
    """
    others = [name for name, operator in operators.items() if operator.role != "combiner"]
    named = f'"@" ({_choice(backends)})'
    replacements = {
        "OR_BACKEND": f"| {named}" if compact else '| "<backend>" backend "</backend>"',
        "BACKEND": '("<backend>" backend "</backend>")?',
    }
    if not backends:
        replacements = dict.fromkeys(replacements, "")
    form = _COMPACT if compact else _TAGGED
    for mark, text in replacements.items():
        form = form.replace(mark, text)
    rules = [
        form,
        _TEXT_FORM,
        f"operator ::= {_choice(operators)}",
        f"member_operator ::= {_choice(others or operators)}",
        f'details ::= (space "{{" space quoted space "}}")? {f"(space {named})?" if backends else ""}',
    ]
    if backends and not compact:
        rules.append(f"backend ::= {_choice(backends)}")
    return {"grammar": "\n".join(rule.strip() for rule in rules) + "\n"}


def _choice(names: Collection[str]) -> str:
    return " | ".join(json.dumps(name) for name in sorted(names))
