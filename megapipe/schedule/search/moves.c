/* Moves of a search: push and shift, as anneal.py describes them.

   A pass x is a number: class * microbatches + microbatch, with class 3 * stage + kind (F 0, B 1, W 2). So x + m is the B
   of an F, and the W of a B. An order holds the rows of all ranks one after another; row[r] is where rank r begins. */

#include "clock.h"

static const int SETS[] = {1, 2, 6, 4, 3}; /* kinds of passes that a shift moves, bit k for kind k of F, B, W */
static const double PATIENCE[] = {0.0, 0.3, 0.6, 1.0}; /* seeds.OVERRUNS */

/* A random number from 0 to n - 1. Our own generator (Knuth's MMIX), because rand() differs between C libraries. */
static int below(State *s, int n) {
    s->draws = s->draws * 6364136223846793005ULL + 1442695040888963407ULL;
    return (int)((s->draws >> 33) * (uint64_t)n >> 31);
}

/* Walks a critical path back from the end of a rank: to the pass before on the rank if that ends when this one starts, else
   to the pass whose result arrives last. In nine of ten moves it is the end of the last rank, else of any. */
static void find_critical(const Problem *p, State *s) {
    int rank = below(s, p->ranks);
    if (below(s, 10)) {
        rank = 0;
        for (int r = 1; r < p->ranks; r++)
            if (end_of(p, s->orders, s->end, r) > end_of(p, s->orders, s->end, rank)) rank = r;
    }
    int i = p->row[rank + 1] - 1;
    while (i >= p->row[rank]) {
        int x = s->orders[i];
        if (i > p->row[rank] && s->end[s->orders[i - 1]] >= (s->end[x] - p->duration[x]) * (1 - 1e-12)) {
            s->path[s->path_length++] = i--;
            continue;
        }
        x = p->source[x];
        if (x == p->passes) return;
        rank = p->rank[x];
        int low = p->row[rank], high = p->row[rank + 1];
        while (low < high) {
            int middle = (low + high) / 2;
            if (s->end[s->orders[middle]] < s->end[x]) low = middle + 1;
            else high = middle;
        }
        while (s->orders[low] != x) low++;
        i = low;
    }
}

/* Renumbers the microbatches of each class in a part of an order: they run in ascending order, wherever a move put them. */
static void in_order(const Problem *p, int *part, int count, int *next) {
    int m = p->microbatches;
    for (int i = 0; i < count; i++) next[part[i] / m] = p->passes;
    for (int i = 0; i < count; i++)
        if (part[i] < next[part[i] / m]) next[part[i] / m] = part[i];
    for (int i = 0; i < count; i++) part[i] = next[part[i] / m]++;
}

/* Moves a pass of the critical path some places forward, or the pass before it some places back, out of its way. Most
   moves are short, because a long one nearly always makes the schedule longer. 0 if the order is not better than limit. */
static int push(const Problem *p, State *st, Scratch *s, double limit) {
    if (!st->path_length) find_critical(p, st);
    if (!st->path_length) return 0;
    int i = st->path[below(st, st->path_length)], m = p->microbatches, places = 1;
    int rank = p->rank[st->orders[i]], begin = p->row[rank], last_of_rank = p->row[rank + 1] - 1;
    while (places < 12 && below(st, 2)) places++;
    int how = below(st, 100), back = how < 50, first = i - 1, last = i;
    if (back) first = i - places < begin ? begin : i - places;
    else last = first + (how >= 85 ? 1 + below(st, 3 * m) : places);
    if (last > last_of_rank) last = last_of_rank;
    int count = last - first, *part = s->order + first;
    memcpy(s->order, st->orders, sizeof(int) * p->passes);
    memmove(part + back, st->orders + first + !back, sizeof(int) * count);
    part[back ? 0 : count] = st->orders[back ? last : first];
    in_order(p, part, count + 1, s->next);
    if (!memcmp(part, st->orders + first, sizeof(int) * (count + 1))) return 0;
    int good = 1;
    for (int j = 0; j <= count; j++) s->mark[part[j]] = 1;
    for (int j = 0; j <= count; j++) {
        int x = part[j];
        if (kind_of(p, x) && s->mark[x - m] == 1) good = 0; /* a B before its F, or a W before its B */
        s->mark[x] = 2;
    }
    for (int j = 0; j <= count; j++) s->mark[part[j]] = 0;
    double held = 0.0;
    for (int j = begin; good && j <= last; j++) {
        held += p->holds[s->order[j]];
        if (held > p->memory[rank]) good = 0;
    }
    if (!good) return 0;
    double t = first > begin ? st->end[st->orders[first - 1]] : 0.0;
    return play_from(p, st->orders, st->end, t, s->order, s->end, s, limit, st->spread);
}

/* orders.backward_sooner: where an F does not fit the memory, a later B whose F has run comes before it. 0 if there is none. */
static int backward_sooner(const Problem *p, const int *order, int count, int rank, int *out, Scratch *s) {
    int m = p->microbatches, made = 0, first = 0, backs = 0, good = 1, *back = s->owed, *done = s->mark;
    double held = 0.0;
    for (int i = 0; i < count; i++)
        if (kind_of(p, order[i]) == 1) back[backs++] = order[i];
    for (int i = 0; good && i < count; i++) {
        int x = order[i];
        if (done[x]) continue;
        if (kind_of(p, x)) {
            good = done[x - m];
            held -= p->holds[x - m];
        } else {
            while (good && held + p->holds[x] > p->memory[rank]) {
                while (first < backs && done[back[first]]) first++;
                int j = first;
                while (j < backs && (done[back[j]] || !done[back[j] - m])) j++;
                if ((good = j < backs)) {
                    done[out[made++] = back[j]] = 1;
                    held -= p->holds[back[j] - m];
                }
            }
            held += p->holds[x];
        }
        if (good) done[out[made++] = x] = 1;
    }
    for (int i = 0; i < made; i++) done[out[i]] = 0;
    return good;
}

/* The same with W: where a pass does not fit the memory, a W that is owed comes before it. */
static int weights_sooner(const Problem *p, const int *order, int count, int rank, int *out, Scratch *s) {
    int m = p->microbatches, made = 0, first = 0, owes = 0, good = 1, *owed = s->owed, *done = s->mark;
    double held = 0.0;
    for (int i = 0; good && i < count; i++) {
        int x = order[i], kind = kind_of(p, x);
        if (done[x]) continue;
        good = !kind || done[x - m];
        while (good && held + p->holds[x] > p->memory[rank]) {
            while (first < owes && done[owed[first]]) first++;
            if ((good = first < owes)) {
                done[out[made++] = owed[first]] = 1;
                held += p->holds[owed[first]];
            }
        }
        if (!good) break;
        if (kind == 1) owed[owes++] = x + m;
        done[out[made++] = x] = 1;
        held += p->holds[x];
    }
    for (int i = 0; i < made; i++) done[out[i]] = 0;
    return good;
}

static void swap_if_more(int *a, int *b) {
    int low = *a < *b ? *a : *b;
    *b = *a < *b ? *b : *a;
    *a = low;
}

/* Lets passes of some kinds, ranks, microbatches and perhaps one chunk start sooner or later by one random time, and sorts
   each row again. In four of ten moves W are taken out and fill the waits anew, as their old places fit the old times. */
static int shift(const Problem *p, State *st, Scratch *s, double limit) {
    int ranks = p->ranks, m = p->microbatches;
    int rank = below(st, ranks), way = below(st, 3);
    int last_rank = way == 0 ? 0 : way == 1 ? ranks - 1 : below(st, ranks);
    int batch = below(st, m), how = below(st, 4);
    int last_batch = how == 0 ? 0 : how < 3 ? m - 1 : below(st, m);
    swap_if_more(&rank, &last_rank);
    swap_if_more(&batch, &last_batch);
    int chunk = below(st, p->stages / ranks);
    if (below(st, 10) >= 7) chunk = -1;
    int kinds = SETS[below(st, 5)];
    double by = 2.0 * p->normal[below(st, 1024)] * p->unit;
    int refill = below(st, 10) < 4;
    double patience = refill ? PATIENCE[below(st, 4)] : 0.0, t = st->end[st->orders[p->row[1] - 1]];
    int changed = 0;
    memcpy(s->order, st->orders, sizeof(int) * p->passes);
    for (int r = 0; r < ranks; r++) {
        const int *order = st->orders + p->row[r];
        int count = p->row[r + 1] - p->row[r], made = 0, *moved = s->moved, *out = s->order + p->row[r];
        int inside = r >= rank && r <= last_rank;
        if (!inside && !refill) continue;
        if (!inside) moved = s->bare + p->row[r];
        for (int i = 0; i < count; i++) { /* sorted by their new times: most stay where they are */
            int x = order[i], c = x / m, b = x % m, chosen = kinds >> c % 3 & 1, j = made;
            if (refill && c % 3 == 2) continue;
            double time = st->end[x] - p->duration[x];
            chosen = chosen && (chunk == -1 || c / 3 / ranks == chunk) && b >= batch && b <= last_batch;
            if (inside) {
                time += chosen ? by : 0.0;
                for (; j > 0 && s->times[j - 1] > time; j--) s->times[j] = s->times[j - 1], moved[j] = moved[j - 1];
            }
            s->times[j] = time, moved[j] = x, made++;
        }
        s->size[r] = made;
        if (!inside) continue;
        in_order(p, moved, made, s->next);
        if (refill && !backward_sooner(p, moved, made, r, s->bare + p->row[r], s)) return 0;
        if (refill) continue;
        if (!weights_sooner(p, moved, made, r, out, s)) return 0;
        int i = 0;
        while (i < count && out[i] == order[i]) i++;
        if (i == count) continue;
        double before = i ? st->end[order[i - 1]] : 0.0;
        if (!changed++ || before < t) t = before;
    }
    if (refill) return fill_weights(p, s->bare, patience, s->order, s->end, s);
    return play_from(p, st->orders, st->end, changed ? t : 0.0, s->order, s->end, s, limit, st->spread);
}

/* Tries a number of moves of an annealing, and returns how many it tried: fewer if the goal is met.

   A move is taken if it ends below cost + heat * d, with d an exponential random number (`decay`). That is Metropolis' rule
   with its random number drawn first, so play() can stop as soon as the limit is exceeded. */
int anneal(const Problem *p, State *st, int moves) {
    size_t n = (size_t)p->passes + p->ranks + 1;
    Scratch s;
    int **const ints[] = {&s.order, &s.moved, &s.bare, &s.owed, &s.next, &s.mark, &s.at, &s.size, &s.paid, &s.owes, &s.ready};
    double **const doubles[] = {&s.end, &s.times, &s.now, &s.held, &s.rest};
    int *whole = calloc(13 * n, sizeof(int)); /* twice for ready, the last: a rank may be there more than once */
    double *real = calloc(5 * n, sizeof(double));
    int done = 0;
    for (int i = 0; i < 11; i++) *ints[i] = whole + i * n;
    for (int i = 0; i < 5; i++) *doubles[i] = real + i * n;
    for (; whole && real && done < moves && st->best > st->goal; done++) {
        double limit = st->cost + st->heat * p->decay[below(st, 1024)];
        st->heat *= st->cooler;
        if (!(below(st, 10) < 6 ? shift : push)(p, st, &s, limit)) continue;
        double cost = length(p, s.order, s.end, st->spread), now = length(p, s.order, s.end, 0.0);
        if (cost > limit) continue;
        memcpy(st->orders, s.order, sizeof(int) * p->passes);
        memcpy(st->end, s.end, sizeof(double) * (p->passes + 1));
        st->cost = cost;
        st->path_length = 0;
        if (now < st->best * (1 - 1e-12)) {
            st->best = now;
            memcpy(st->best_orders, s.order, sizeof(int) * p->passes);
            memcpy(st->best_end, s.end, sizeof(double) * (p->passes + 1));
        }
    }
    free(whole);
    free(real);
    return done;
}

/* fit.fill_weights of orders of F and B, size[r] of rank r. Returns 0 if they block or do not fit. */
int fill(const Problem *p, const int *bare, const int *size, double patience, int *full, double *end) {
    size_t n = (size_t)p->passes + p->ranks + 1;
    int *whole = calloc(6 * n, sizeof(int)); /* twice for ready, the last: a rank may be there more than once */
    double *real = calloc(2 * n, sizeof(double));
    int done = 0;
    if (whole && real) {
        Scratch s = {.owed = whole, .at = whole + n, .paid = whole + 2 * n, .owes = whole + 3 * n, .ready = whole + 4 * n};
        s.now = real;
        s.held = real + n;
        s.size = (int *)size;
        done = fill_weights(p, bare, patience, full, end, &s);
    }
    free(whole);
    free(real);
    return done;
}
