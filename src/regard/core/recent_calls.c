/* The lookup of `recent_calls.recall` and the call of the function that it finds, as one function of an extension
 * module. Between two attention calls of a model, other work evicts Python's code and data from the processor's caches,
 * and each line of Python then takes a microsecond: this function replaces some thirty lines.
 *
 * `call` has the effect of `recent_calls.recall` followed by the call of the route's function in `attention.attention`;
 * tests run with either. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The fields of a stored call that this file reads, in the order in which `recent_calls.remember` writes them; others
 * follow. */
enum {
    SCORE, NORMALIZE, MASK, BIAS, REQUEST, SCORE_HELD, MASK_HELD, BIAS_HELD, DROPOUT, GRADIENTS, DETERMINISTIC,
    RECORDING, CHECK, ROUTE, WITH_REQUEST, DIRECT, FIELDS
};
/* The arguments of `call`. */
enum { A_QUERY, A_KEY, A_VALUE, A_SCORE, A_NORMALIZE, A_MASK, A_BIAS, A_DROPOUT, A_REQUEST, ARGUMENTS };

/* The stored calls, from `store`; the class of tensors, that of results, functions and modules, from `prepare`; names of
 * attributes and an empty tuple, made at import. */
static PyObject *recent, *tensor_type, *result_type;
static PyObject *has_gradients, *is_deterministic, *count_modes, *forward_mode, *graphs, *by_keys;
static PyObject *is_nested, *current_level, *recording, *output_name, *weights_name, *log_prob_name, *no_arguments;

/* Returns 1 if the attribute of the object is true, 0 if it is false, -1 after an error. */
static int is_set(PyObject *object, PyObject *name) {
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL) return -1;
    int set = found == Py_True ? 1 : found == Py_False ? 0 : PyObject_IsTrue(found);
    Py_DECREF(found);
    return set;
}

/* Returns 1 if a function returns a true object, 0 if it does not, -1 after an error; steals the reference `found`. */
static int truth(PyObject *found) {
    if (found == NULL) return -1;
    int set = found == Py_True ? 1 : found == Py_False ? 0 : PyObject_IsTrue(found);
    Py_DECREF(found);
    return set;
}

/* `recent_calls._same`: 1 if the record is the one that `held` refers to, and its tensors have not changed. */
static int same(PyObject *record, PyObject *held) {
    if (held == Py_None || record == Py_None) return 0;
    PyObject *found = PyObject_CallNoArgs(PyTuple_GET_ITEM(held, 0));
    if (found == NULL) return -1;
    Py_DECREF(found);
    if (found != record) return 0;
    PyObject *references = PyTuple_GET_ITEM(held, 1), *tensors[8];
    Py_ssize_t count = PyTuple_GET_SIZE(references), ready = 0;
    if (count > 8) return 0;
    for (; ready < count; ready++) {
        tensors[ready] = PyObject_CallNoArgs(PyTuple_GET_ITEM(references, ready));
        if (tensors[ready] == NULL) break;
    }
    int result = -1;
    if (ready == count) result = truth(PyObject_Vectorcall(PyTuple_GET_ITEM(held, 2), tensors, count, NULL));
    while (ready > 0) Py_DECREF(tensors[--ready]);
    return result;
}

/* Returns 1 if the stored call has these arguments, where objects are compared by identity; 0 if not, -1 on an error. */
static int matches(PyObject *stored, PyObject *const *given, PyObject *gradients, PyObject *deterministic) {
    static const int places[3][3] = {
        {A_MASK, MASK, MASK_HELD}, {A_SCORE, SCORE, SCORE_HELD}, {A_BIAS, BIAS, BIAS_HELD}
    };
    if (given[A_NORMALIZE] != PyTuple_GET_ITEM(stored, NORMALIZE)) return 0;
    if (given[A_REQUEST] != PyTuple_GET_ITEM(stored, REQUEST)) return 0;
    for (int i = 0; i < 3; i++) {
        PyObject *record = given[places[i][0]];
        if (record == PyTuple_GET_ITEM(stored, places[i][1])) continue;
        int equal = same(record, PyTuple_GET_ITEM(stored, places[i][2]));
        if (equal <= 0) return equal;
    }
    PyObject *dropout = PyTuple_GET_ITEM(stored, DROPOUT);
    if (!PyFloat_CheckExact(dropout) || PyFloat_AS_DOUBLE(dropout) != PyFloat_AS_DOUBLE(given[A_DROPOUT])) return 0;
    if (gradients != PyTuple_GET_ITEM(stored, GRADIENTS)) return 0;
    if (deterministic != PyTuple_GET_ITEM(stored, DETERMINISTIC)) return 0;
    PyObject *capture = PyObject_GetAttr(graphs, recording);
    if (capture == NULL) return -1;
    Py_DECREF(capture);
    if (capture != PyTuple_GET_ITEM(stored, RECORDING)) return 0;
    return truth(PyObject_Vectorcall(PyTuple_GET_ITEM(stored, CHECK), given, 3, NULL));
}

/* Returns an instance of the class of results with these fields; steals the reference
 * `output`, borrows the others (NULL: default). */
static PyObject *result(PyObject *output, PyObject *weights, PyObject *log_prob) {
    PyObject *made = PyBaseObject_Type.tp_new((PyTypeObject *)result_type, no_arguments, NULL);
    int failed = made == NULL || PyObject_GenericSetAttr(made, output_name, output) < 0;
    if (!failed && weights != NULL) failed = PyObject_GenericSetAttr(made, weights_name, weights) < 0;
    if (!failed && log_prob != NULL) failed = PyObject_GenericSetAttr(made, log_prob_name, log_prob) < 0;
    Py_DECREF(output);
    if (failed) Py_CLEAR(made);
    return made;
}

/* Returns the result of the functions of a route, or the route itself if they are missing or return None. */
static PyObject *run(PyObject *route, PyObject *with_request, PyObject *direct, PyObject *const *given) {
    if (with_request != Py_None) {
        PyObject *const arguments[] = {
            given[A_QUERY], given[A_KEY], given[A_VALUE], given[A_SCORE], given[A_MASK], given[A_BIAS], given[A_REQUEST]
        };
        PyObject *fields = PyObject_Vectorcall(with_request, arguments, 7, NULL);
        if (fields == NULL) return NULL;
        if (fields != Py_None) {
            if (!PyTuple_Check(fields) || PyTuple_GET_SIZE(fields) < 1 || PyTuple_GET_SIZE(fields) > 3) {
                Py_DECREF(fields);
                PyErr_SetString(PyExc_TypeError, "with_request must return output, weights and log-probabilities");
                return NULL;
            }
            Py_ssize_t count = PyTuple_GET_SIZE(fields);
            PyObject *output = Py_NewRef(PyTuple_GET_ITEM(fields, 0));
            PyObject *made = result(
                output, count > 1 ? PyTuple_GET_ITEM(fields, 1) : NULL, count > 2 ? PyTuple_GET_ITEM(fields, 2) : NULL
            );
            Py_DECREF(fields);
            return made;
        }
        Py_DECREF(fields);
    }
    if (direct != Py_None) {
        PyObject *const arguments[] = {
            given[A_QUERY], given[A_KEY], given[A_VALUE], given[A_SCORE], given[A_MASK], given[A_BIAS]
        };
        PyObject *output = PyObject_Vectorcall(direct, arguments, 6, NULL);
        if (output == NULL) return NULL;
        if (output != Py_None) return result(output, NULL, NULL);
        Py_DECREF(output);
    }
    return Py_NewRef(route);
}

/* Returns the result of a stored call with these arguments; its route, if the route has no functions or they refuse the
 * values of the tensors; None if there is no such stored call. */
static PyObject *call(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != ARGUMENTS || recent == NULL) {
        PyErr_SetString(PyExc_TypeError, "call takes 9 arguments, after prepare");
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        if ((PyObject *)Py_TYPE(given[i]) != tensor_type) Py_RETURN_NONE;
        int nested = is_set(given[i], is_nested);  /* torch's guards crash the process on nested tensors */
        if (nested != 0) return nested < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (!PyFloat_CheckExact(given[A_DROPOUT])) Py_RETURN_NONE;
    PyObject *level = PyObject_GetAttr(forward_mode, current_level);
    if (level == NULL) return NULL;
    long differentiated = PyLong_AsLong(level);
    Py_DECREF(level);
    if (differentiated >= 0) Py_RETURN_NONE;
    if (PyErr_Occurred()) return NULL;
    int modes = truth(PyObject_CallNoArgs(count_modes));
    if (modes != 0) return modes < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *gradients = PyObject_CallNoArgs(has_gradients), *deterministic = PyObject_CallNoArgs(is_deterministic);
    PyObject *found = NULL, *calls = Py_NewRef(recent);
    if (gradients == NULL || deterministic == NULL) goto ended;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(calls); i++) {
        PyObject *stored = PyTuple_GET_ITEM(calls, i);
        int equal = matches(stored, given, gradients, deterministic);
        if (equal < 0) goto ended;
        if (equal) {
            found = run(
                PyTuple_GET_ITEM(stored, ROUTE), PyTuple_GET_ITEM(stored, WITH_REQUEST),
                PyTuple_GET_ITEM(stored, DIRECT), given
            );
            goto ended;
        }
    }
    PyObject *route = PyObject_Vectorcall(by_keys, given, ARGUMENTS, NULL);
    if (route == NULL || route == Py_None) {
        found = route;
        goto ended;
    }
    PyObject *with_request = PyObject_GetAttrString(route, "with_request");
    PyObject *direct = PyObject_GetAttrString(route, "direct");
    if (with_request != NULL && direct != NULL) found = run(route, with_request, direct, given);
    Py_XDECREF(with_request);
    Py_XDECREF(direct);
    Py_DECREF(route);
ended:
    Py_DECREF(calls);
    Py_XDECREF(gradients);
    Py_XDECREF(deterministic);
    return found;
}

/* Stores the tuple of stored calls, which `call` searches from now on. */
static PyObject *store(PyObject *module, PyObject *calls) {
    (void)module;
    if (!PyTuple_Check(calls)) {
        PyErr_SetString(PyExc_TypeError, "the stored calls must be a tuple");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(calls); i++) {
        PyObject *stored = PyTuple_GET_ITEM(calls, i);
        if (!PyTuple_Check(stored) || PyTuple_GET_SIZE(stored) < FIELDS) {
            PyErr_SetString(PyExc_TypeError, "a stored call lacks fields");
            return NULL;
        }
    }
    Py_XSETREF(recent, Py_NewRef(calls));
    Py_RETURN_NONE;
}

/* Receives the classes, functions and modules that `call` uses. */
static PyObject *prepare(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject **places[] = {
        &tensor_type, &result_type, &has_gradients, &is_deterministic, &count_modes, &forward_mode, &graphs, &by_keys
    };
    if (PyTuple_GET_SIZE(arguments) != 8) {
        PyErr_SetString(PyExc_TypeError, "prepare takes 8 arguments");
        return NULL;
    }
    for (int i = 0; i < 8; i++) Py_XSETREF(*places[i], Py_NewRef(PyTuple_GET_ITEM(arguments, i)));
    if (recent == NULL) recent = PyTuple_New(0);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, "Return the result of a stored call, its route or None."},
    {"store", store, METH_O, "Store the tuple of stored calls."},
    {"prepare", prepare, METH_VARARGS, "Receive the classes, functions and modules that `call` uses."},
    {NULL, NULL, 0, NULL}
};

static int begin(PyObject *module) {
    (void)module;
    is_nested = PyUnicode_InternFromString("is_nested");
    current_level = PyUnicode_InternFromString("_current_level");
    recording = PyUnicode_InternFromString("recording");
    output_name = PyUnicode_InternFromString("output");
    weights_name = PyUnicode_InternFromString("weights");
    log_prob_name = PyUnicode_InternFromString("log_prob");
    no_arguments = PyTuple_New(0);
    return PyErr_Occurred() ? -1 : 0;
}

/* With slots, Python does not enter the module into sys.modules. */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)begin}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "recent_calls", NULL, 0, methods, slots, NULL, NULL, NULL
};

PyMODINIT_FUNC PyInit_recent_calls(void) {
    return PyModuleDef_Init(&definition);
}
