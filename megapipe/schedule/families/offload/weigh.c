/* What a table takes with some of its activations moved, as simulate.py says of what copies.py makes. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { F, B, W, BW, R, O, L };
enum { HOLD, OFFLOAD, RECOMPUTE };

typedef struct {
    int ranks, places; /* a place is a stage and a microbatch, or slice of one */
    const int *row;    /* row[r]: where rank r begins in an order; row[ranks]: its end */
    const int *next, *prev, *earlier, *later, *last; /* places whose results a place needs, -1 for none; the last slice
                                                        of its document */
    const double *time;                     /* by kind and place */
    const double *lag_next, *lag_prev;
    const double *mem_b, *mem_w, *mem_o, *mem_r;
    const double *before, *own; /* gradients of keys: those of its document that a backward takes, its own that it frees */
    const double *limits; /* of each rank, with the hair that rounding needs */
} Moved;

typedef struct { double time, change; } Moment;

typedef struct { /* a table: row r is of size[r] passes from 5 * row[r] on, each kind * places + place */
    int *pass, *size;
    double *start, *end, *output, *gradient, *host, *back;
} Rows;

static void run(const Moved *t, const int *verb, Rows *rows, int *at, double *lanes) {
    int n = t->places, moved = 1;
    for (int x = 0; x < n; x++) rows->output[x] = rows->gradient[x] = rows->host[x] = INFINITY;
    for (int r = 0; r < t->ranks; r++) at[r] = 0, lanes[3 * r] = lanes[3 * r + 1] = lanes[3 * r + 2] = 0.0;
    while (moved) {
        moved = 0;
        for (int r = 0; r < t->ranks; r++)
            for (int first = 5 * t->row[r]; at[r] < rows->size[r]; at[r]++, moved = 1) {
                int i = first + at[r], kind = rows->pass[i] / n, x = rows->pass[i] % n, to;
                double *lane = lanes + 3 * r + (kind == O ? 1 : kind == L ? 2 : 0), now = *lane, comes = 0.0;
                if (kind >= O && lanes[3 * r] > now) now = lanes[3 * r];
                if (kind == F && (to = t->prev[x]) >= 0) comes = rows->output[to] + t->lag_prev[x];
                if (kind == F && (to = t->earlier[x]) >= 0 && rows->output[to] > comes) comes = rows->output[to];
                if ((kind == B || kind == BW) && (to = t->next[x]) >= 0) comes = rows->gradient[to] + t->lag_next[x];
                if ((kind == B || kind == BW) && (to = t->later[x]) >= 0 && rows->gradient[to] > comes)
                    comes = rows->gradient[to];
                for (to = x + 1; kind == R && to <= t->last[x]; to++)
                    if (verb[to] == OFFLOAD && rows->back[to] > comes) comes = rows->back[to];
                if (comes > now) now = comes;
                if ((kind == B || kind == BW) && rows->back[x] > now) now = rows->back[x];
                if (kind == L && rows->host[x] > now) now = rows->host[x];
                if ((kind == R || kind == O) && rows->output[x] > now) now = rows->output[x];
                if (isinf(now)) break;
                rows->start[i] = now;
                *lane = now = now + t->time[rows->pass[i]];
                rows->end[i] = now;
                if (kind == F) rows->output[x] = now;
                if (kind == B || kind == BW) rows->gradient[x] = now;
                if (kind == O) rows->host[x] = now;
                if (kind == L || kind == R) rows->back[x] = now;
            }
    }
}

/* Rank r's copies, where with_offload puts them: an O behind its forward, an L where it is just in time. */
static int put_copies(const Moved *t, const Rows *rows, const int *verb, int r, int *out, int *work) {
    int n = t->places, first = 5 * t->row[r], size = rows->size[r], count = 0, made = 0;
    int *forward = work, *used = work + n, *next = work + 2 * n, *behind = work + 3 * n; /* behind[i]: the L there */
    double back = INFINITY;
    for (int i = 0; i < size; i++) behind[i] = -1;
    for (int i = 0; i < size; i++) {
        int kind = rows->pass[first + i] / n, x = rows->pass[first + i] % n;
        if (verb[x] != OFFLOAD) continue;
        if (kind == F) forward[x] = i;
        if (kind != B && kind != BW) continue;
        int j = count++; /* the latest backward first */
        for (; j && rows->start[first + i] >= rows->start[first + used[j - 1]]; j--) used[j] = used[j - 1];
        used[j] = i;
    }
    for (int j = 0; j < count; j++) {
        int x = rows->pass[first + used[j]] % n, at = forward[x];
        double due = rows->start[first + used[j]];
        back = (back < due ? back : due) - t->time[L * n + x];
        int low = 0, high = size;
        while (low < high) {
            int middle = (low + high) / 2;
            if (rows->end[first + middle] * (1 - 1e-9) <= back) low = middle + 1;
            else high = middle;
        }
        if (low > used[j]) low = used[j]; /* a backward that takes no time may end by then */
        if (low - 1 > at) at = low - 1;
        next[x] = behind[at];
        behind[at] = x;
    }
    for (int i = 0; i < size; i++) {
        int x = rows->pass[first + i] % n;
        out[made++] = rows->pass[first + i];
        if (rows->pass[first + i] / n == F && verb[x] == OFFLOAD) out[made++] = O * n + x;
        for (x = behind[i]; x >= 0; x = next[x]) out[made++] = L * n + x;
    }
    return made;
}

static int put(Moment *moments, int count, int copies, double time, double change) {
    int j = count; /* copies end while passes run */
    for (; copies && j && moments[j - 1].time > time; j--) moments[j] = moments[j - 1];
    moments[j] = (Moment){time, change};
    return count + 1;
}

static double most_held(const Moved *t, const Rows *rows, const int *verb, int r, int copies, Moment *moments, double *over) {
    int n = t->places, first = 5 * t->row[r], count = 0;
    double held = 0.0, most = 0.0;
    for (int i = first; i < first + rows->size[r]; i++) {
        int kind = rows->pass[i] / n, x = rows->pass[i] % n, back = kind == B || kind == BW;
        double b = t->mem_b[x], w = t->mem_w[x], o = t->mem_o[x], input = t->mem_r[x];
        double change[] = {verb[x] == RECOMPUTE ? input : b, w - b, -w, -b, b - input, -o, o};
        if (back) count = put(moments, count, copies, rows->start[i], t->before[x]);
        count = put(moments, count, copies, kind == F || kind == R || kind == L ? rows->start[i] : rows->end[i], change[kind]);
        if (back) count = put(moments, count, copies, rows->end[i], -t->own[x]);
    }
    *over = INFINITY;
    for (int i = 0; i < count; i++) {
        held += moments[i].change;
        if (held > most) most = held;
        if (held > t->limits[r] && isinf(*over)) *over = moments[i].time;
    }
    return most;
}

/* The makespan of an order of F, B, W and BW with these choices by place, below 0 if ranks wait for each other for ever. seen: when each place's forward begins and ends and its backward begins; by rank the
   most it holds, and when it first holds more than its limit. */
double weigh(const Moved *t, const int *order, const int *verb, double *seen) {
    int n = t->places, all = t->row[t->ranks], copies = 0;
    int *whole = malloc(sizeof(int) * (10 * (size_t)all + 3 * (size_t)n + 5 * (size_t)all + 2 * t->ranks));
    double *real = malloc(sizeof(double) * (20 * (size_t)all + 4 * (size_t)n + 3 * t->ranks)), makespan = 0.0;
    if (!whole || !real) {
        free(whole), free(real);
        return -1.0;
    }
    int *plain = whole, *moved = whole + 5 * all, *work = whole + 10 * all, *size = work + 3 * n + 5 * all, *at = size + t->ranks;
    double *times = real + 10 * (size_t)all, *lanes = times + 4 * n;
    Moment *moments = (Moment *)(lanes + 3 * t->ranks);
    Rows rows = {plain, size, real, real + 5 * (size_t)all, times, times + n, times + 2 * n, times + 3 * n};
    for (int x = 0; x < n; x++) {
        rows.back[x] = verb[x] == HOLD ? 0.0 : INFINITY;
        copies += verb[x] == OFFLOAD;
    }
    for (int r = 0; r < t->ranks; r++) {
        int made = 5 * t->row[r];
        for (int i = t->row[r]; i < t->row[r + 1]; i++) {
            int kind = order[i] / n, x = order[i] % n;
            if ((kind == B || kind == BW) && verb[x] == RECOMPUTE) plain[made++] = R * n + x;
            plain[made++] = order[i];
        }
        size[r] = made - 5 * t->row[r];
    }
    if (copies) {
        for (int x = 0; x < n; x++)
            if (verb[x] == OFFLOAD) rows.back[x] = 0.0;
        run(t, verb, &rows, at, lanes);
        int blocked = 0;
        for (int r = 0; r < t->ranks; r++) blocked |= at[r] < size[r];
        if (!blocked)
            for (int r = 0; r < t->ranks; r++) size[r] = put_copies(t, &rows, verb, r, moved + 5 * t->row[r], work);
        rows.pass = blocked ? plain : moved;
        for (int x = 0; x < n; x++) rows.back[x] = verb[x] == HOLD ? 0.0 : INFINITY;
    }
    run(t, verb, &rows, at, lanes);
    for (int r = 0; r < t->ranks && makespan >= 0; r++) {
        int first = 5 * t->row[r];
        if (at[r] < size[r]) {
            makespan = -1.0;
            break;
        }
        for (int i = first; i < first + size[r]; i++) {
            int kind = rows.pass[i] / n, x = rows.pass[i] % n;
            if (rows.end[i] > makespan) makespan = rows.end[i];
            if (kind == F) seen[x] = rows.start[i], seen[n + x] = rows.end[i];
            if (kind == B || kind == BW) seen[2 * n + x] = rows.start[i];
        }
        seen[3 * n + r] = most_held(t, &rows, verb, r, copies, moments, seen + 3 * n + t->ranks + r);
    }
    free(whole), free(real);
    return makespan;
}
