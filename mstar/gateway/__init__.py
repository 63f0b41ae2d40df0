"""The process that holds the clients' connections: HTTP and the native protocol in, text out.

It owns every request it accepted (RequestBook), its text, its stop strings and its end; it tokenizes, places
requests with the conductor and hands them to deciders through shared memory. It knows nothing of schedules,
pages or tensors, and never imports torch.
"""
