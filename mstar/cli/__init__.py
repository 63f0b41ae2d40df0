"""What people type: a file a command, light to import, one clear sentence for every mistake.

Commands say what to do and show what came of it; they decide nothing about serving.
"""
