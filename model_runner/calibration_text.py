"""What K and V are measured on: the kinds of text that models are asked about, a page in all."""

from __future__ import annotations

PROSE = """\
The ferry left at six in the morning, when the harbour was still grey and the gulls had not yet found the fish market.
Marta stood at the rail with her collar up and counted the boats that stayed behind: eleven, one fewer than yesterday.
"You are early," said the man beside her. He sold tickets, mended nets in winter, and knew everybody's business.
"I could not sleep." She did not say why. Behind them the town grew small, first the church, then the hill, until only
the lighthouse was left, white against the rain. Nobody had lit it since 1974, but the island still set its clocks by
the hour at which its shadow reached the school.
"""

FACTS = """\
# Water

Water boils at 100 °C (212 °F) at sea level; at 3,000 m it boils at about 90 °C, which is why rice takes longer there.

1. Its density is largest at 4 °C: 999.97 kg/m³.
2. Ice floats, because it takes up 9 % more room.
3. The heat that melts 1 kg of ice (334 kJ) would warm the same water from 0 to 80 °C.

| substance | melts | boils |
|---|---|---|
| water | 0 °C | 100 °C |
| ethanol | -114.1 °C | 78.4 °C |
| mercury | -38.8 °C | 356.7 °C |

Question: how much energy warms 250 ml of tea by 30 degrees? Answer: E = m c ΔT = 0.25 × 4186 × 30 ≈ 31,400 J.
"""

CODE = """\
import json
from collections import defaultdict


def total_by_city(path: str, *, least: float = 0.0) -> dict[str, float]:
    \"\"\"Sums the amounts of all orders, city by city.\"\"\"
    totals: dict[str, float] = defaultdict(float)
    with open(path, encoding="utf-8") as file:
        for line in file:
            order = json.loads(line)  # {"id": 17, "city": "Lyon", "items": [{"price": 3.5, "count": 2}]}
            totals[order["city"]] += sum(item["price"] * item["count"] for item in order["items"])
    return {city: round(amount, 2) for city, amount in totals.items() if amount >= least}

SELECT city, COUNT(*) AS orders FROM orders WHERE placed_at >= '2024-01-01' GROUP BY city HAVING COUNT(*) > 10;
<ul class="menu"><li><a href="/index.html?page=2&amp;sort=desc">Next &raquo;</a></li></ul>
"""

LANGUAGES = """\
Der Zug nach Freiburg fährt heute von Gleis sieben. Le train suivant part dans vingt minutes, s'il n'est pas en retard.
Mañana por la mañana lloverá en toda la costa norte. 明日は北海道で雪が降るでしょう。今天下午三点开会,请准时参加。
Завтра утром будет холодно, возьмите перчатки. سيصل القطار في الساعة الخامسة. कल सुबह बाज़ार बंद रहेगा। 🙂
"""

TEXTS = (PROSE, FACTS, CODE, LANGUAGES)
CHAT = (
    {"role": "user", "content": "Why does bread rise? Please answer in two sentences, then give me a short recipe."},
    {
        "role": "assistant",
        "content": "Yeast eats the sugars in flour and gives off carbon dioxide. The gas is held by the dough, which "
        "grows around its bubbles.\n\n- 500 g flour\n- 350 ml water\n- 7 g dry yeast\n- 10 g salt\n\nKnead it, let it "
        "rest for two hours, and bake it at 230 °C for 35 minutes.",
    },
    {"role": "user", "content": "Thanks! What if I only have 300 g of flour?"},
)
"""Turns of one conversation, for models that have a chat template."""
