"""What a request may say: one table of fields, and the checks that turn a body into a frozen record.

Pure data and logic: no I/O, no clock, no tokenizer. Checks that need the model (token ids in range, the
window) take plain numbers. How an error travels to a client is the gateway's business.
"""
