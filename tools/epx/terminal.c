/* SPDX-License-Identifier: Apache-2.0 */
#include "terminal.h"

#include <string.h>
#include <sys/ioctl.h>

int terminal_columns(int fd, int fallback)
{
    struct winsize size = {0};

    return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : fallback;
}

void print_wrapped(FILE *to, const char *text, int indent, int most)
{
    int column = indent, newline = 0;

    while (*text) {
        const int length = (int)strcspn(text, " \n");

        if (newline || (column > indent && column + 1 + length > most)) {
            fprintf(to, "\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            fputc(' ', to);
            column++;
        }
        fprintf(to, "%.*s", length, text);
        column += length;
        newline = text[length] == '\n';
        text += length + (text[length] != 0);
    }
    fputc('\n', to);
}
