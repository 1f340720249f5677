"""The steps between the checked body of a request and its response, which all routes share."""
