"""Questions about two books, and about what is in neither, by which search is measured.

Each question has a text that stands in the passage with its answer, as far as the book has one. Half of them use the
words of the book, half paraphrase it.
"""

from __future__ import annotations

ALICE = (
    ("What was written on the label around the neck of the bottle?", "DRINK ME"),
    ("What does the Caterpillar smoke?", "hookah"),
    ("What prize does the Dodo give to Alice after the race?", "elegant thimble"),
    ("Which question does the Hatter ask about a raven?", "raven like a writing"),
    ("Where did the three sisters in the Dormouse's tale live?", "treacle-well"),
    ("What do they use as mallets in the croquet game?", "live flamingo"),
    ("Why are the gardeners painting the roses?", "red rose-tree"),
    ("What does the baby turn into when Alice carries it out of the house?", "neither more nor less than a pig"),
    ("Who is accused of stealing the tarts?", "Knave of Hearts, he stole"),
    ("What is the name of Alice's cat?", "Dinah"),
    ("What happens when she eats from the side of the mushroom?", "One side will make you grow"),
    ("Why is the air in the Duchess's kitchen so hard to breathe?", "too much pepper"),
    ("Which school subjects were taught under the sea?", "Reeling and Writhing"),
    ("What remains of the vanishing cat at the end?", "grin"),
    ("At what hour has the Hatter's watch stopped?", "six o'clock"),
    ("How did the White Rabbit's garment look when he hurried past?", "waistcoat-pocket"),
    ("Who was sent down the chimney?", "Bill"),
    ("What formed the water that the mouse swam in?", "pool of tears"),
)
"""About `alice.md`."""
MOBY = (
    ("Who preaches the sermon in the whaleman's chapel?", "Father Mapple"),
    ("How does the preacher climb into the pulpit?", "side ladder"),
    ("What kinds of chowder are served at the Try Pots inn?", "Clam or Cod"),
    ("Which coin does Ahab nail to the mast?", "sixteen dollar"),
    ("What is Queequeg's little black god called?", "Yojo"),
    ("What is ambergris and where does it come from?", "ambergris"),
    ("What is the captain's false leg made of?", "ivory leg"),
    ("Which share of the profit is Ishmael offered?", "seven hundred and seventy-seventh"),
    ("What does the captain of the Rachel ask for?", "my own boy"),
    ("What saves the narrator from drowning in the end?", "Buoyed up by that coffin"),
    ("Why does the colour of the whale frighten the narrator?", "whiteness of the whale"),
    ("What instrument does Ahab destroy on the deck?", "Foolish toy"),
    ("Who goes mad after being left alone in the sea?", "an idiot"),
    ("Who forges the captain's harpoon?", "Perth"),
    ("What pale fire burns on the yard-arms during the storm?", "corpusants"),
    ("Who warns the two friends about the ship before they sail?", "Elijah"),
    ("In which port do they board the Pequod?", "Nantucket"),
    ("What does the carpenter make the lifebuoy from?", "life-buoy of a coffin"),
)
"""About `moby-dick.md`."""
NOWHERE = (
    "How do I renew an expired driving licence?",
    "What is the boiling point of nitrogen at sea pressure?",
    "Which version of Python introduced pattern matching?",
    "How many calories does a banana contain?",
    "What did the tenant agree about the deposit and notice period?",
    "Who won the football world cup in Brazil?",
    "How does photosynthesis convert carbon dioxide into glucose?",
    "What is the maximum dosage of ibuprofen for adults?",
    "Explain the difference between TCP and UDP.",
    "Which keyboard shortcut saves a spreadsheet?",
    "When is the invoice for the laptop due?",
    "How is the transformer attention matrix computed?",
    "What are the opening hours of the museum in Vienna?",
    "Which antibiotic treats bacterial pneumonia?",
    "How do I reset the router password?",
    "What caused the inflation of 1970 in Argentina?",
    "Where can I recharge an electric bicycle?",
    "What is the capital of Kazakhstan?",
)
"""About nothing in either book."""
