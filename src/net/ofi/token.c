/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokens: for every pair of ranks and each direction 31 bits made from the group's key, which the sender puts into the
 * CQ data of each write. A token says who sent, too, so that a rank cannot pass for another by mistake.
 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <stdlib.h>
#include <string.h>

#include "boot/auth.h"
#include "util/status.h"

struct ofi_tokens {
    uint8_t key[CRYPTO_KEY];
    uint32_t mask;
    struct {
        uint32_t token; /* 0 = free: no token is 0 */
        int32_t peer;   /* -1: several have it */
    } entries[];
};

static int make_token(const struct net_options *o, int from, int to, uint32_t *token)
{
    const int32_t pair[3] = {o->index, from, to};
    uint8_t bytes[CRYPTO_KEY];

    if (auth_derive(o->key, "arrivals", pair, sizeof(pair), bytes))
        return -1;
    memcpy(token, bytes, sizeof(*token));
    *token &= OFI_TOKEN_MASK;
    *token |= !*token;
    return 0;
}

static void insert(struct ofi_tokens *tokens, uint32_t token, int peer)
{
    uint32_t at = token & tokens->mask;

    while (tokens->entries[at].token && tokens->entries[at].token != token)
        at = (at + 1) & tokens->mask;
    tokens->entries[at].peer = tokens->entries[at].token ? -1 : peer;
    tokens->entries[at].token = token;
}

/* Tokens are random: they are their own hash. */
int ofi_token_peer(const struct ofi_net *n, uint32_t token)
{
    const struct ofi_tokens *tokens = n->tokens;
    uint32_t at = token & tokens->mask;

    for (; tokens->entries[at].token; at = (at + 1) & tokens->mask)
        if (tokens->entries[at].token == token)
            return tokens->entries[at].peer;
    return -2;
}

uint32_t ofi_token_mark(const struct ofi_net *n, const void *text, size_t bytes)
{
    uint8_t out[CRYPTO_KEY];
    uint32_t mark;

    if (auth_derive(n->tokens->key, "source", text, bytes, out))
        return OFI_SOURCE;
    memcpy(&mark, out, sizeof(mark));
    mark |= OFI_SOURCE;
    return mark + (mark == OFI_SOURCE);
}

epx_status ofi_tokens_open(struct ofi_net *n, const struct net_options *options)
{
    uint32_t places = 8, token;

    if (!options->key || n->info->domain_attr->cq_data_size < sizeof(uint64_t))
        return EPX_OK;
    while (places < 4 * (uint32_t)n->nranks)
        places *= 2;
    n->tokens = calloc(1, sizeof(*n->tokens) + places * sizeof(n->tokens->entries[0]));
    if (!n->tokens)
        return fail(EPX_ERR_MEMORY, "ofi: no memory for the tokens of %d ranks", n->nranks);
    n->tokens->mask = places - 1;
    memcpy(n->tokens->key, options->key, sizeof(n->tokens->key));
    for (int peer = 0; peer < n->nranks; peer++) {
        if (make_token(options, peer, n->rank, &token) || make_token(options, n->rank, peer, &n->peers[peer].token))
            return fail(EPX_ERR_SYSTEM, "ofi: the tokens of %d ranks cannot be computed", n->nranks);
        insert(n->tokens, token, peer);
    }
    return EPX_OK;
}

void ofi_tokens_close(struct ofi_net *n)
{
    free(n->tokens);
    n->tokens = NULL;
}

#endif
