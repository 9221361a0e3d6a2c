"""More than 200 distinct texts that tokenizers tend to split differently: scripts, emoji, code, digits, spaces."""

# ruff: noqa: RUF001 - look-alike characters are the point

from itertools import product

_SENTENCES = (
    "",
    " ",
    "a",
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "I'll don't WE'RE they've it's o'clock 'tis 'Twas",
    "1234567",
    "3.14159, -2.71e10, 0x1F, 1,000,000 and 50%",
    "  \n\n\tx",
    "漢字かな交じり文 👍🏽",
    "a\r\nb\r\n\r\nc",
    "ǅ ß ı İ ſ",
    "Žluťoučký kůň úpěl ďábelské ódy",
    "नमस्ते दुनिया",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "안녕하세요 세계",
    "Привет, мир! Ёлка и съезд.",
    "Γειά σου Κόσμε",
    "สวัสดีชาวโลก",
    "👩‍🚀🇯🇵 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🧿🧿🧿",
    "e\u0301 vs \u00e9; a\u0308 vs \u00e4",
    "zero\u200bwidth\u200djoiner\ufeffbom",
    "non\u00a0breaking\u2003em\u3000ideographic",
    "x" * 200,
    "ab" * 150,
    " " * 80 + "x" + " " * 33,
    "\t" * 9 + "tabs" + "\n" * 12,
    "https://example.org/a/b?c=d&e=%20f#g",
    "user@example.com; C:\\Windows\\System32; /usr/bin/env",
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 3 == 0]\n",
    "for (int i = 0; i < n; ++i) { sum += a[i]; } // done",
    '<html><body class="x">&amp; &lt;tag&gt;</body></html>',
    "SELECT * FROM t WHERE a='b' AND c>=10;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "- item\n  - sub\n    - subsub\n\n1. one\n2. two",
    "!!!???...---***___+++===",
    "\u2581\u2581space signs\u2581",
    "Ġ byte level Ċ signs",
    "<0x41> byte names <0xFF>",
    "\U00020000\U0002a6d6 rare Han",
    "½ ² Ⅷ ① ٣ ৩ numerals",
    "…—–“quotes” ‘single’ «guillemets»",
    "MixedCASEandsnake_case_andcamelCase",
)
_LEADS = ("", " ", "  ", "\n", "\n\n ", "(", "Ü")
_CORES = ("word", "2024", "漢字", "👍🏽", "don't", "x = 1;", "…")
_TAILS = ("", " ", "\n", " end.", "   \t")

TEXTS: tuple[str, ...] = tuple(
    dict.fromkeys([*_SENTENCES, *(lead + core + tail for lead, core, tail in product(_LEADS, _CORES, _TAILS))])
)
assert len(TEXTS) >= 250
