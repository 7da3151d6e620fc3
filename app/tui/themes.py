"""The themes: calm ones with one accent colour and greys, and one of high contrast without greys."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="calm-dark",
    dark=True,
    primary="#7aa2c8",
    secondary="#8a919c",
    accent="#7aa2c8",
    warning="#d9a441",
    error="#d0706b",
    success="#7aa2c8",
    foreground="#d3d6db",
    background="#15171a",
    surface="#1a1d21",
    panel="#22262b",
    variables={
        "footer-key-foreground": "#7aa2c8",
        "footer-description-foreground": "#8a919c",
        "text-disabled": "#8a919c",
    },
)
LIGHT = Theme(
    name="calm-light",
    dark=False,
    primary="#2f6690",
    secondary="#6a717b",
    accent="#2f6690",
    warning="#9a6700",
    error="#a83a35",
    success="#2f6690",
    foreground="#24282d",
    background="#fafafa",
    surface="#f3f4f5",
    panel="#e8eaec",
    variables={
        "footer-key-foreground": "#2f6690",
        "footer-description-foreground": "#626974",
        "text-disabled": "#626974",
    },
)
CONTRAST = Theme(
    name="high-contrast",
    dark=True,
    primary="#ffff00",
    secondary="#ffffff",
    accent="#ffff00",
    warning="#ffb000",
    error="#ff8080",
    success="#80ff80",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1c1c1c",
    variables={
        "footer-key-foreground": "#ffff00",
        "footer-description-foreground": "#ffffff",
        "text-muted": "#ffffff",
        "text-disabled": "#d0d0d0",
        "surface-lighten-2": "#ffffff",
        "block-cursor-foreground": "#000000",
        "block-cursor-background": "#ffff00",
        "input-selection-background": "#0050c0",
    },
)
OWN = (DARK, LIGHT, CONTRAST)
"""The themes that Textual does not include."""
NAMES = {"dark": DARK.name, "light": LIGHT.name, "contrast": CONTRAST.name, "terminal": "ansi-dark"}
"""Textual's theme name for each value of the setting `theme`."""
