/* SPDX-License-Identifier: Apache-2.0 */
#include "terminal.h"

#include <sys/ioctl.h>

int terminal_columns(int fd, int fallback)
{
    struct winsize size = {0};

    return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : fallback;
}
