"""The screens: chat, models (F2), settings (F3)."""
