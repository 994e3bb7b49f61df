/* SPDX-License-Identifier: Apache-2.0 */
#include "page.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "epx/epx.h"
#include "options.h"

/* Colours are variables: a dark page has others, and paper has light ones. */
static const char style[] =
    ":root{--back:#fbfbfa;--card:#fff;--ink:#1d2126;--soft:#5b6470;--line:#dfe2e6;--mark:#b3261e;"
    "--c0:#0b63b0;--c1:#c2500a;--c2:#1c7c44;--c3:#8a3ffc;--c4:#a8006d;--c5:#7a6400;--c6:#00767f;--c7:#6b4a36}\n"
    "@media screen and (prefers-color-scheme:dark){:root{--back:#14171b;--card:#1c2026;--ink:#e6e9ed;--soft:#a0a9b4;"
    "--line:#343b45;--mark:#ff8a80;--c0:#6cb6ff;--c1:#ffa25c;--c2:#66d18f;--c3:#c4a5ff;--c4:#ff86c8;--c5:#e3c84b;"
    "--c6:#4fd4dd;--c7:#d6ae93}}\n"
    "*{box-sizing:border-box}html{color-scheme:light dark}body{margin:0 auto;max-width:1180px;padding:28px 22px 60px;"
    "background:var(--back);color:var(--ink);font:15px/1.5 system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,"
    "sans-serif}\n"
    "h1{font-size:26px;margin:0 0 2px}h2{font-size:19px;margin:36px 0 4px}h3{font-size:14px;margin:0 0 6px;"
    "font-weight:600}p{margin:4px 0 12px;max-width:82ch;color:var(--soft)}.sub{font-size:16px;margin:0 0 14px}\n"
    "pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:10px 12px;overflow-x:auto;"
    "white-space:pre-wrap;font:13px/1.45 ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}"
    "pre span{white-space:nowrap}\n"
    ".grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:16px}\n"
    "figure,.facts{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 14px "
    "10px}figure svg{display:block;width:100%;height:auto}\n"
    "svg text{fill:var(--soft);font-size:12px;font-family:inherit}svg .ends{fill:var(--ink)}svg .grid-line{stroke:"
    "var(--line)}svg .mark{stroke:var(--mark);stroke-dasharray:4 3}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0 0;padding:0;list-style:none;font-size:13px;"
    "color:var(--soft)}.legend svg{display:inline-block;width:26px;height:10px;margin-right:6px}\n"
    "table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}th,td{padding:3px 12px 3px 0;"
    "text-align:left;vertical-align:top}th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right}"
    ".wide{overflow-x:auto}.wide td,.wide th{border-bottom:1px solid var(--line);white-space:nowrap}\n"
    "@media print{:root{--back:#fff}body{padding:0;max-width:none;font-size:11px}figure,.facts,pre{break-inside:avoid}"
    "h2,h2+p{break-after:avoid}h2+p,section{break-inside:avoid}section:last-of-type{break-inside:auto}"
    "h2{margin-top:22px}.wide{overflow:visible}tr{break-inside:avoid}"
    "h3{font-size:11px}.legend{font-size:9px;gap:2px 10px}.sub{font-size:12px}"
    "td,th{font-size:9px;padding-right:8px}a{color:inherit}"
    /* A grid would let pages end inside of its figures. */
    ".grid{display:block}.grid>*{display:inline-block;vertical-align:top;width:calc(50% - 8px);margin:0 6px 8px 0}}\n";

static const char colours[] = ".s0{--s:var(--c0)}.s1{--s:var(--c1)}.s2{--s:var(--c2)}.s3{--s:var(--c3)}"
                              ".s4{--s:var(--c4)}.s5{--s:var(--c5)}.s6{--s:var(--c6)}.s7{--s:var(--c7)}"
                              "path.s,line.s{stroke:var(--s);fill:none;stroke-width:2}path.dash,line.dash{"
                              "stroke-dasharray:5 4}circle.s,rect.s{fill:var(--s)}rect.pale{fill-opacity:.4}svg "
                              ".in{fill:var(--card);font-size:11px}\n";

void page_text(struct page *page, const char *text)
{
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", page->to);
        else if (*text == '>')
            fputs("&gt;", page->to);
        else if (*text == '&')
            fputs("&amp;", page->to);
        else if (*text == '"')
            fputs("&quot;", page->to);
        else
            fputc(*text, page->to);
    }
}

int page_check(const char *program, const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);

    if (fd >= 0)
        unlink(path);
    else if (errno == EEXIST)
        fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return options_complain(program, "cannot write '%s': %s", path, strerror(errno));
    close(fd);
    return 0;
}

int page_begin(struct page *page, const char *program, const char *path, const char *title, const char *subtitle)
{
    memset(page, 0, sizeof(*page));
    snprintf(page->path, sizeof(page->path), "%s", path);
    page->to = fopen(path, "we");
    if (!page->to)
        return options_complain(program, "cannot write '%s': %s", path, strerror(errno));
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
          "<link rel=\"icon\" href=\"data:,\">\n<title>",
          page->to);
    page_text(page, title);
    fprintf(page->to, "</title>\n<style>\n%s%s</style>\n</head>\n<body>\n<h1>", style, colours);
    page_text(page, title);
    fputs("</h1>\n<p class=\"sub\">", page->to);
    page_text(page, subtitle);
    fputs("</p>\n", page->to);
    return 0;
}

/* "</script>" cannot be in the numbers: their text has no '<' from outside. */
int page_end(struct page *page, const char *program, const char *rows)
{
    int bad;

    fprintf(page->to, "%s<script type=\"application/json\" id=\"epx-numbers\">\n[\n",
            page->sections ? "</section>\n" : "");
    for (const char *at = rows; *at; at++) {
        if (*at == '\n' && at[1])
            fputs(",\n", page->to);
        else if (*at == '<')
            fputs("\\u003c", page->to);
        else
            fputc(*at, page->to);
    }
    fputs("]\n</script>\n</body>\n</html>\n", page->to);
    bad = ferror(page->to);
    if (fclose(page->to) != 0)
        bad = 1;
    return bad ? options_complain(program, "cannot write '%s': %s", page->path, strerror(errno)) : 0;
}

void page_section(struct page *page, const char *title, const char *text)
{
    fprintf(page->to, "%s<section>\n<h2>", page->sections++ ? "</section>\n" : "");
    page_text(page, title);
    fputs("</h2>\n<p>", page->to);
    page_text(page, text);
    fputs("</p>\n", page->to);
}

static int is_plain_word(const char *word)
{
    return *word &&
           strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./,:=+@%") == strlen(word);
}

static void write_quoted(struct page *page, const char *word)
{
    char letter[2] = "";

    fputc('\'', page->to);
    for (; *word; word++) {
        letter[0] = *word;
        page_text(page, *word == '\'' ? "'\\''" : letter);
    }
    fputc('\'', page->to);
}

void page_command(struct page *page, int argc, char **argv)
{
    fputs("<pre id=\"command\">epx", page->to);
    for (int i = 0; i < argc; i++) {
        const int option = argv[i][0] == '-'; /* not to be broken behind its hyphens */

        fputs(option ? " <span>" : " ", page->to);
        if (is_plain_word(argv[i]))
            page_text(page, argv[i]);
        else
            write_quoted(page, argv[i]);
        fputs(option ? "</span>" : "", page->to);
    }
    fputs("</pre>\n", page->to);
}

void page_facts_begin(struct page *page, const char *title)
{
    fputs("<div class=\"facts\"><h3>", page->to);
    page_text(page, title);
    fputs("</h3><table>\n", page->to);
}

void page_fact(struct page *page, const char *name, const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fputs("<tr><th>", page->to);
    page_text(page, name);
    fputs("</th><td>", page->to);
    page_text(page, text);
    fputs("</td></tr>\n", page->to);
}

void page_facts_end(struct page *page)
{
    fputs("</table></div>\n", page->to);
}

/* The value of the first line of `path` that begins with `key`; "" without. */
static void find_value(const char *path, const char *key, char *value, size_t bytes)
{
    char line[256];
    FILE *file = fopen(path, "re");

    value[0] = 0;
    while (file && !value[0] && fgets(line, sizeof(line), file)) {
        const char *colon = strchr(line, ':');

        if (strncmp(line, key, strlen(key)) != 0 || !colon)
            continue;
        snprintf(value, bytes, "%s", colon + 1 + strspn(colon + 1, " \t"));
        value[strcspn(value, "\n")] = 0;
    }
    if (file)
        fclose(file);
}

/* 64-bit ARM says numbers only: those of servers. */
static const char *arm_name(const char *part)
{
    static const struct {
        const char *part, *name;
    } names[] = {{"0xd08", "Cortex-A72"},  {"0xd0c", "Neoverse N1"}, {"0xd40", "Neoverse V1"},
                 {"0xd49", "Neoverse N2"}, {"0xd4f", "Neoverse V2"}, {"0xd83", "Neoverse V3"},
                 {"0xd84", "Neoverse V3"}, {"0xd8e", "Neoverse N3"}};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (!strcmp(part, names[i].part))
            return names[i].name;
    return NULL;
}

static void find_cpu(char *cpu, size_t bytes)
{
    char maker[16], part[16];

    find_value("/proc/cpuinfo", "model name", cpu, bytes);
    if (cpu[0])
        return;
    find_value("/proc/cpuinfo", "CPU implementer", maker, sizeof(maker));
    find_value("/proc/cpuinfo", "CPU part", part, sizeof(part));
    if (!strcmp(maker, "0x41") && arm_name(part))
        snprintf(cpu, bytes, "%s", arm_name(part));
    else
        snprintf(cpu, bytes, "maker %s, part %s", maker, part);
}

void page_machine(struct page *page, const char *title)
{
    struct utsname system;
    char cpu[128], memory[64], when[32];
    const time_t now = time(NULL);
    struct tm utc;

    uname(&system);
    find_cpu(cpu, sizeof(cpu));
    find_value("/proc/meminfo", "MemTotal", memory, sizeof(memory));
    gmtime_r(&now, &utc);
    strftime(when, sizeof(when), "%Y-%m-%d %H:%M UTC", &utc);
    page_facts_begin(page, title);
    page_fact(page, "CPU", "%s, %s", cpu, system.machine);
    page_fact(page, "cores", "%ld", sysconf(_SC_NPROCESSORS_ONLN));
    page_fact(page, "memory", "%.1f GB", strtod(memory, NULL) * 1024 / 1e9);
    page_fact(page, "system", "%s %s", system.sysname, system.release);
    page_fact(page, "EPX", "%d.%d.%d", EPX_VERSION_MAJOR, EPX_VERSION_MINOR, EPX_VERSION_PATCH);
    page_fact(page, "date", "%s", when);
    page_facts_end(page);
}
