"""The end of a JSON object in a text that comes in parts."""

import re

# A part of a string without quotation marks, escapes and control characters.
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
LITERALS = ("true", "false", "null")
BLANKS = frozenset(" \t\n\r")
HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Reads one JSON object, without a limit of its depth and without keeping its text."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_invalid = False
        self.has_value = False  # its first value has begun, or it is complete
        # What comes next: start, key, key_or_end, colon, value, value_or_end, comma, string,
        # escape, hex, number or literal.
        self.state = "start"
        self.open: list[str] = []  # brackets
        self.is_key = False  # the string is a key
        self.token = ""  # of a number or a literal, or the rest of an escape

    def add(self, text: str) -> int:
        """How many characters continue the object: all, unless it ends or becomes invalid."""
        index = 0
        while index < len(text) and not self.is_complete:
            if self.state == "string" and (plain := PLAIN.match(text, index)):
                index = plain.end()
                continue
            if self.state in ("number", "literal") and not self.continues_token(text[index]):
                if self.token and not self.end_token():
                    self.is_invalid = True
                    return index
                continue
            if not self.step(text[index]):
                self.is_invalid = True
                return index
            index += 1
        return index

    def continues_token(self, character: str) -> bool:
        if self.state == "number":
            return character in NUMBER_CHARACTERS
        return character.isascii() and character.isalpha()

    def end_token(self) -> bool:
        """The number or literal is complete; returns whether it is one."""
        is_number = self.state == "number" and NUMBER.fullmatch(self.token) is not None
        is_literal = self.state == "literal" and self.token in LITERALS
        self.state, self.token = "comma", ""
        return is_number or is_literal

    def step(self, character: str) -> bool:
        """Read a character; returns False if it is not allowed."""
        if self.state in ("string", "escape", "hex"):
            return self.string_step(character)
        if self.state == "number":
            self.token += character
            return True
        if self.state == "literal":
            self.token += character
            return any(literal.startswith(self.token) for literal in LITERALS)
        return character in BLANKS or self.structure_step(character)

    def string_step(self, character: str) -> bool:
        if self.state == "hex":
            self.token += character
            if len(self.token) == 4:
                self.state, self.token = "string", ""
            return character in HEX
        if self.state == "escape":
            self.state = "hex" if character == "u" else "string"
            return character in '"\\/bfnrtu'
        if character == '"':
            self.state = "colon" if self.is_key else "comma"
        elif character == "\\":
            self.state = "escape"
        else:  # a control character
            return False
        return True

    def structure_step(self, character: str) -> bool:
        state = self.state
        if state == "start":
            return character == "{" and self.open_bracket("{")
        if state in ("key", "key_or_end"):
            if character == '"':
                self.state, self.is_key = "string", True
                return True
            return state == "key_or_end" and character == "}" and self.close_bracket("{")
        if state == "colon":
            self.state = "value"
            return character == ":"
        if state == "comma":
            if character == ",":
                self.state = "key" if self.open[-1] == "{" else "value"
                return True
            return character in "}]" and self.close_bracket("{" if character == "}" else "[")
        if state == "value_or_end" and character == "]":
            return self.close_bracket("[")
        return self.begin_value(character)

    def begin_value(self, character: str) -> bool:
        if character in "{[":
            self.has_value = True
            return self.open_bracket(character)
        if character == '"':
            self.state, self.is_key = "string", False
        elif character == "-" or (character.isascii() and character.isdigit()):
            self.state, self.token = "number", character
        elif character in "tfn":
            self.state, self.token = "literal", character
        else:
            return False
        self.has_value = True
        return True

    def open_bracket(self, bracket: str) -> bool:
        self.open.append(bracket)
        self.state = "key_or_end" if bracket == "{" else "value_or_end"
        return True

    def close_bracket(self, bracket: str) -> bool:
        if self.open.pop() != bracket:
            return False
        self.state = "comma"
        self.is_complete = not self.open
        self.has_value = self.has_value or self.is_complete
        return True
